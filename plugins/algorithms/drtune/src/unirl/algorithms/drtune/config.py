"""Settings of DRTune."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.reward_loss_config import RewardLossConfig, beyond_schedule

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DrtuneConfig"]


@dataclass
class DrtuneConfig(RewardLossConfig):
    gradient_steps: int = limit(5, least=1)
    """K: steps whose velocity has a gradient, evenly spaced from the first step to the one at which denoising stops,
    and shifted by a random offset for each training step. Each costs a forward and a backward, wherever it lies."""
    stop_window: int = limit(1, least=1)
    """Denoising stops at one of this many last steps, drawn for each training step, and its velocity leads straight to
    the clean latent. 1 always goes to the end."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also more gradient steps than there are before the earliest stop."""
        yield from super().problems(plan, stage)
        with_window = f" with stop_window={self.stop_window}" if self.stop_window > 1 else ""
        yield from beyond_schedule(
            stage,
            reach=self.gradient_steps + self.stop_window - 1,
            key=".gradient_steps",
            got=f"{self.gradient_steps}{with_window}",
        )
