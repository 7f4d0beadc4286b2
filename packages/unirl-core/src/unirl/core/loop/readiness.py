"""Checks of this machine before anything is loaded, and a list of what they cannot see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import UniRLError
from ..types.sampling import LatentSamplingConfig
from .run_data import read_data

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.environment import Environment
    from ..specs.plan import Plan

__all__ = ["Readiness", "engine_environment", "look", "make_environment"]


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Result of the checks that load nothing."""

    problems: tuple[str, ...]
    """Why the plan would not start here."""
    unseen: tuple[str, ...]
    """Conditions that can only be checked by loading the parts."""


def look(plan: Plan, *, catalog: Catalog) -> Readiness:
    """Check the data, the checkpoint's config and the engine's environment. Loads nothing."""
    problems: list[str] = []
    unseen = ["the weights", "the memory that they need"]
    try:
        read_data(plan)
    except UniRLError as error:
        problems.append(str(error))
    if plan.run.device.startswith("cuda"):
        unseen.append(f"whether {plan.run.device} is available")
    path = str(getattr(plan.model.config, "path", ""))
    folder = Path(path).expanduser()
    if folder.is_dir():
        problems += _sizes(plan, folder)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        unseen.append(f"the checkpoint {path!r}, which is not a folder here but may be a Hub id")
    elif path:
        problems.append(f"model.path: there is no folder {path!r}.")
    try:
        environment = engine_environment(plan, catalog=catalog)
        if environment is not None:
            # Resolving `auto` would need torch.
            accels = [accel for accel in environment.locks if plan.run.device.startswith((accel, "auto"))]
            within = _within(plan)
            if not any(environment.is_present(accel, within=within) for accel in accels):
                made = " or ".join(f"`{environment.command(accel, within=within)}`" for accel in accels)
                problems.append(f"engine {plan.engine.name!r}: its environment is missing; create it with {made}.")
    except UniRLError as error:
        problems.append(str(error))
    if plan.rewards:
        unseen.append("the models of rewards")
    return Readiness(problems=tuple(problems), unseen=tuple(unseen))


def engine_environment(plan: Plan, *, catalog: Catalog) -> Environment | None:
    """The environment that the plan's engine runs in; None for one that runs in this process."""
    if not plan.engine.spec.environment:
        return None
    result = cast("Environment", catalog.resolve(plan.engine.spec.environment))
    return result.of(str(_setting(plan, "release")))


def make_environment(plan: Plan, *, catalog: Catalog) -> None:
    """Create the environment that the plan's engine runs in, unless it exists. Reports progress on stderr."""
    import sys

    environment = engine_environment(plan, catalog=catalog)
    if environment is None:
        return
    import torch

    on_cuda = plan.run.device.startswith("cuda") or (plan.run.device == "auto" and torch.cuda.is_available())
    environment.make(
        "cuda" if on_cuda else "cpu", within=_within(plan), tell=lambda line: print(line, file=sys.stderr, flush=True)
    )


def _within(plan: Plan) -> Path | None:
    folder = _setting(plan, "env_dir")
    return Path(folder) if folder else None


def _setting(plan: Plan, name: str) -> str:
    """A setting that engines with an environment may have; "" where this one does not."""
    return str(vars(plan.engine.config).get(name, ""))


def _sizes(plan: Plan, folder: Path) -> Iterator[str]:
    """Image sizes that a checkpoint in the diffusers layout cannot generate: they must be multiples of a patch."""
    try:
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        transformer = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        multiple = 2 ** (len(vae["block_out_channels"]) - 1) * int(transformer["patch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # another layout: the model checks it when it is loaded
    for track, sampling in plan.sampling.items():
        if isinstance(sampling, LatentSamplingConfig):
            prefix = f"sampling.{track}" if len(plan.sampling) > 1 else "sampling"
            for key in ("height", "width"):
                value: Any = getattr(sampling, key)
                if value % multiple:
                    yield f"{prefix}.{key}: got {value}, expected a multiple of {multiple} for {folder}."
