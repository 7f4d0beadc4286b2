"""Checks of this machine before anything is loaded, and a list of what they cannot see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..data.run_data import read_data
from ..errors import UniRLError

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.environment import Environment
    from ..specs.part_config import PartConfig
    from ..specs.plan import Choice, Plan
    from ..specs.spec import EngineSpec

__all__ = ["Readiness", "make_environments", "preflight"]


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Result of the checks that load nothing."""

    problems: tuple[str, ...]
    """Why the plan would not start here."""
    unseen: tuple[str, ...]
    """Conditions that can only be checked by loading the parts."""


def preflight(plan: Plan, *, catalog: Catalog) -> Readiness:
    """Check the data, the checkpoint's config and the engine's environment. Loads nothing."""
    problems: list[str] = []
    unseen = ["the weights", "the memory that they need"]
    try:
        read_data(plan)
    except UniRLError as error:
        problems.append(str(error))
    if plan.run.device.startswith("cuda"):
        unseen.append(f"whether {plan.run.device} is available")
    for learner in plan.learners.values():
        path = str(getattr(learner.model.config, "path", ""))
        folder = Path(path).expanduser()
        if folder.is_dir():
            continue
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
            unseen.append(f"the checkpoint {path!r}, which is not a folder here but may be a Hub id")
        elif path:
            problems.append(f"{learner.model.key}.path: there is no folder {path!r}.")
    for engine in _engines(plan):
        try:
            environment = _environment(engine, catalog)
            if environment is not None:
                # Resolving `auto` would need torch.
                accels = [accel for accel in environment.locks if plan.run.device.startswith((accel, "auto"))]
                within = _within(engine)
                if not any(environment.is_present(accel, within=within) for accel in accels):
                    made = " or ".join(f"`{environment.command(accel, within=within)}`" for accel in accels)
                    problems.append(f"engine {engine.name!r}: its environment is missing; create it with {made}.")
        except UniRLError as error:
            problems.append(str(error))
    if plan.rewards:
        unseen.append("the models of rewards")
    return Readiness(problems=tuple(problems), unseen=tuple(unseen))


def make_environments(plan: Plan, *, catalog: Catalog) -> None:
    """Create the environments that the plan's engines run in, unless they exist. Reports progress on stderr."""
    import sys

    for engine in _engines(plan):
        environment = _environment(engine, catalog)
        if environment is None:
            continue
        import torch

        on_cuda = plan.run.device.startswith("cuda") or (plan.run.device == "auto" and torch.cuda.is_available())
        environment.make(
            "cuda" if on_cuda else "cpu",
            within=_within(engine),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )


def _engines(plan: Plan) -> list[Choice[EngineSpec, PartConfig]]:
    return list({stage.engine.key: stage.engine for stage in plan.stages}.values())


def _environment(engine: Choice[EngineSpec, PartConfig], catalog: Catalog) -> Environment | None:
    """The environment that an engine runs in; None for one that runs in this process."""
    if not engine.spec.environment:
        return None
    return cast("Environment", catalog.resolve(engine.spec.environment)).of(_setting(engine, "release"))


def _within(engine: Choice[EngineSpec, PartConfig]) -> Path | None:
    folder = _setting(engine, "env_dir")
    return Path(folder) if folder else None


def _setting(engine: Choice[EngineSpec, PartConfig], name: str) -> str:
    """A setting that engines with an environment may have; "" where this one does not."""
    return str(vars(engine.config).get(name, ""))
