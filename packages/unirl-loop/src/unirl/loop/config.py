"""Settings of launchers that keep several training models in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason
from unirl.core.specs.part_config import LauncherConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["LocalConfig", "OffloadingConfig"]


@dataclass
class OffloadingConfig(LauncherConfig):
    """Settings of every launcher whose processes may train several models."""

    offload_idle: bool = False
    """With several models that train: keep those that are idle in CPU memory, with their gradients, optimizer state and
    averages. Each process then has one of them on its device, at the cost of moving them several times a step."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """One model, which is never idle."""
        trained = [] if plan is None else [one for one in plan.learners.values() if one.backend is not None]
        if self.offload_idle and len(trained) == 1:
            yield Reason(
                key=".offload_idle",
                text=f"got true, but {trained[0].model.name!r} is the only model that trains, and is never idle. Leave "
                "it out.",
            )


@dataclass
class LocalConfig(OffloadingConfig):
    """Everything is built in this process."""
