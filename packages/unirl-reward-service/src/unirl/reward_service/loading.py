"""A reward by name and settings, as a scorer process and `unirl score` build it, and the version of what was built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.check import check_config
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.spec import RewardSpec
from unirl.loop.checked_reward import CheckedReward
from unirl.loop.parts import errors_under

__all__ = ["LoadedReward", "load_reward"]


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    spec: RewardSpec
    reward: CheckedReward
    version: str
    """Hash of the code of the reward's package, its settings, and the files and folders that they name."""


def load_reward(
    use: str, settings: Mapping[str, Any], *, device: str, catalog: Catalog, key: str = "settings"
) -> LoadedReward:
    """Build an installed reward.

    key: path of the settings, for errors. Raises PluginNotFound for an unknown reward, RecipeError for its settings.
    """
    found = catalog.get("reward", use)
    spec = cast(RewardSpec, found.spec)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(catalog.resolve(spec.config)), dict(settings))
        config = cast(RewardConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise RecipeError(f"{key}: {' '.join(str(error).split())}") from error
    config.use = spec.name
    check_config(config, key=key)
    with errors_under(key, spec=spec):
        built = catalog.resolve(spec.build)(config, device=device)
    parts = {"settings": _computing(config), "code": _code(spec.build), "dist": [found.dist, found.version]}
    version = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for file in _files(config):
        _add_file(version, file)
    reward = CheckedReward(f"reward.{spec.name}", built, spec=spec)
    return LoadedReward(spec=spec, reward=reward, version=version.hexdigest())


def _computing(config: RewardConfig) -> dict[str, Any]:
    """Settings that change scores: not the weight in a sum, and not the stage. Paths count by content."""
    plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))
    for name in ("weight", "stage"):
        del plain[name]
    for file in config.read_files().values():
        plain = {name: v.replace(str(file), file.name) if isinstance(v, str) else v for name, v in plain.items()}
    return {name: "" if _existing(value) else value for name, value in plain.items()}


def _files(config: RewardConfig) -> Iterator[Path]:
    """Files and folders of weights: every setting that is an existing path, and those that the config names."""
    yield from (path for value in vars(config).values() if (path := _existing(value)))
    yield from config.read_files().values()


def _existing(value: object) -> Path | None:
    if not isinstance(value, str) or not value:
        return None
    path = Path(value).expanduser()
    try:
        # A bare word is a name, even where a file of this name happens to be in the current folder.
        return path if os.sep in value and path.exists() else None
    except OSError:
        # Longer than a path may be: a prompt template.
        return None


def _code(target: str) -> str:
    """Hash of the Python files of the package in which a reward is built."""
    result = hashlib.sha256()
    spec = find_spec(target.partition(":")[0])
    assert spec is not None and spec.origin is not None, f"{target} was resolved before"
    folder = Path(spec.origin).parent
    # A plugin of one file is in a folder with files that are not its own.
    for file in sorted(folder.glob("*.py")) if (folder / "plugin.py").is_file() else [Path(spec.origin)]:
        _add_file(result, file)
    return result.hexdigest()


def _add_file(result: Any, path: Path) -> None:
    """Add the content of a file, or of all files of a folder with their names below it."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            result.update(f"{file.relative_to(path) if path.is_dir() else ''}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                while piece := content.read(1 << 20):
                    result.update(piece)
