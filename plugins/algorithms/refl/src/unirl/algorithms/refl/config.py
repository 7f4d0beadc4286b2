"""Settings of ReFL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.reward_loss_config import RewardLossConfig, beyond_schedule

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["ReflConfig"]


@dataclass
class ReflConfig(RewardLossConfig):
    stop_window: int = limit(10, least=1)
    """Denoising stops at one of this many last steps, drawn for each training step, and its velocity leads straight to
    the clean latent. The paper draws from the last 10 of 40."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also steps that the schedule does not have."""
        yield from super().problems(plan, stage)
        yield from beyond_schedule(stage, reach=self.stop_window, key=".stop_window", got=str(self.stop_window))
