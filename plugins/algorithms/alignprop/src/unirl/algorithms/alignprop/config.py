"""Settings of AlignProp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.reward_loss_config import RewardLossConfig, beyond_schedule

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["AlignpropConfig"]


@dataclass
class AlignpropConfig(RewardLossConfig):
    gradient_steps: int = limit(0, least=0)
    """K: the last denoise steps that the gradient goes through; 0 draws K for each training step, evenly."""
    max_gradient_steps: int = limit(0, least=0)
    """Largest K that is drawn; 0 is all steps of the schedule, as in the paper. The smallest is 1."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also steps that the schedule does not have, and a range that nothing is drawn from."""
        yield from super().problems(plan, stage)
        if self.gradient_steps and self.max_gradient_steps:
            yield Reason(
                key=".max_gradient_steps",
                text=f"got {self.max_gradient_steps} with gradient_steps={self.gradient_steps}, which is not drawn; "
                "set one of them to 0.",
            )
        for name in ("gradient_steps", "max_gradient_steps"):
            steps = int(getattr(self, name))
            yield from beyond_schedule(stage, reach=steps, key=f".{name}", got=str(steps))
