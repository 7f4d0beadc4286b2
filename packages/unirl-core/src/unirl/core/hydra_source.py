"""What Hydra reads for us: part options from the catalog, recipes from their folders.

Two config sources and one search-path plugin, registered with Hydra once. They act only inside `sources(...)`; for
anything else that uses Hydra in this process they add nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from .config import LatentSamplingConfig, PartConfig, RecipeConfig, SamplingConfig, TextSamplingConfig
from .errors import PluginBroken, RecipeError
from .exchanged import Exchange, LeftOut, leave_out
from .recipe_files import PART_GROUPS, RecipeRoot
from .spec import Kind

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["ROOT", "SAMPLING", "SCHEMA", "PartsSource", "RecipesSource", "config_class", "exchanging", "sources"]

SCHEMA = "unirl"
"""The schema of a recipe, first in every defaults list: `- /unirl`."""
ROOT = "_recipe_"
"""The primary config that Hydra composes: it only names the recipe. Hydra takes the groups of `+group@package=option`
relative to the primary config's folder, and a recipe may lie in one."""
DEFAULT_LAUNCHER = "local"
"""Taken where it is installed. Without one, the parts are built in this process, which is the same."""
SAMPLING: dict[str, type[SamplingConfig]] = {"latent": LatentSamplingConfig, "text": TextSamplingConfig}
"""Options of the group `sampling`, which belongs to the core."""


@dataclass(frozen=True, kw_only=True)
class _Sources:
    catalog: Catalog
    roots: tuple[RecipeRoot, ...]
    recipe: str
    exchanged: tuple[Exchange, ...] = ()
    left_out: list[LeftOut] = field(default_factory=lambda: list[LeftOut]())


_active: ContextVar[_Sources | None] = ContextVar("_active", default=None)


@contextmanager
def sources(catalog: Catalog, roots: Sequence[RecipeRoot], *, recipe: str) -> Generator[None]:
    """Inside, Hydra composes the config `ROOT` from this recipe, the parts of this catalog and the files of these
    folders, first come first."""
    plugins = Plugins.instance()
    for plugin in (PartsSource, RecipesSource, UniRLSearchPath):
        plugins.register(plugin)
    token = _active.set(_Sources(catalog=catalog, roots=tuple(roots), recipe=recipe))
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def exchanging(exchanged: Sequence[Exchange]) -> Generator[list[LeftOut]]:
    """Inside, recipe files come without what these parts have no key for. Gives what was left out, as it is found."""
    active = _active.get()
    assert active is not None, "exchanging() stands inside of sources()"
    inner = replace(active, exchanged=tuple(exchanged), left_out=[])
    token = _active.set(inner)
    try:
        yield inner.left_out
    finally:
        _active.reset(token)


def config_class(catalog: Catalog, group: str, name: str) -> type[Any]:
    """The config dataclass of an option. Imports the module that holds it, and no other part's.

    Raises PluginNotFound for an unknown name, PluginBroken when the spec names something else than a PartConfig.
    """
    if group == "sampling":
        return SAMPLING[name]
    found = catalog.get(cast(Kind, group), name)
    target = catalog.resolve(found.spec.config)
    if not (isinstance(target, type) and is_dataclass(target) and issubclass(target, PartConfig)):
        raise PluginBroken(
            f"{group} {name!r} ({found.dist} {found.version}): its spec names the config {found.spec.config!r}, "
            "which is no dataclass that inherits unirl.core.config.PartConfig."
        )
    return target


class UniRLSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        active = _active.get()
        if active is not None:
            search_path.append(provider="unirl", path="unirl://parts")
            for root in active.roots:
                search_path.append(provider=root.owner or "recipes", path=f"recipes://{root.folder}")


class PartsSource(ConfigSource):
    """Options of the part groups. Listing takes names alone; the chosen one's config class is imported."""

    @staticmethod
    def scheme() -> str:
        return "unirl"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", *PART_GROUPS)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return (not group and name in (SCHEMA, ROOT)) or (group in PART_GROUPS and name in self._options(group))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        groups: list[str] = sorted(PART_GROUPS) if not config_path and results_filter is not ObjectType.CONFIG else []
        if results_filter is ObjectType.GROUP:
            return groups
        return [*groups, *([SCHEMA] if not config_path else self._options(config_path))]

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {config_path}")
        if name == ROOT:
            config = OmegaConf.create({"defaults": [f"/{self._sources.recipe}"]})
        elif not group:
            config = OmegaConf.structured(RecipeConfig)
            # Listed so that `launcher=ray` and `transport=...` replace them as every other part is replaced.
            launcher = [{"launcher": DEFAULT_LAUNCHER}] if DEFAULT_LAUNCHER in self._options("launcher") else []
            with open_dict(config):
                config.defaults = ["_self_", *launcher, {"transport": None}]
        else:
            config = OmegaConf.structured(config_class(self._sources.catalog, group, name))
            if group != "sampling":
                cast(DictConfig, config).use = name
        header = {"package": None if group else "_global_"}
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def _options(self, group: str) -> list[str]:
        if group == "sampling":
            return sorted(SAMPLING)
        return sorted(self._sources.catalog.names(cast(Kind, group)))

    @property
    def _sources(self) -> _Sources:
        active = _active.get()
        assert active is not None, "unirl:// is on the search path only inside sources()"
        return active


class RecipesSource(ConfigSource):
    """A folder of recipes. A recipe is a whole config wherever its file lies, so its package is `_global_`."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for entry in (Path(self.path) / config_path).iterdir():
            self._list_add_result(names, str(Path(config_path) / entry.name), entry.name, results_filter)
        return sorted(set(names))

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        text = file.read_text(encoding="utf-8")
        header = self._get_header_dict(text)
        if header["package"] is None and config_path.split("/")[0] not in PART_GROUPS:
            header["package"] = "_global_"
        try:
            config = OmegaConf.create(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise RecipeError(f"{file}:{line}: not valid YAML: {error.problem}.") from error
        if not isinstance(config, DictConfig):
            raise RecipeError(f"{file}: a recipe is a mapping of sections; found a list.")
        active = _active.get()
        if active is not None and header["package"] == "_global_":
            path = config_path.removesuffix(".yaml")
            found = leave_out(config, file=path, exchanged=active.exchanged)
            # Hydra may read a file more than once.
            active.left_out.extend(one for one in found if one not in active.left_out)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def file(self, config_path: str) -> Path:
        """The file of a config path, whether it exists or not."""
        return Path(self.path) / self._normalize_file_name(config_path)
