"""Settings of DRaFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.reward_loss_config import RewardLossConfig, beyond_schedule, outside_rectified_flow

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DraftConfig"]


@dataclass
class DraftConfig(RewardLossConfig):
    gradient_steps: int = limit(1, least=1)
    """K: the last denoise steps that the gradient goes through."""
    noise_draws: int = limit(0, least=0)
    """DRaFT-LV: noise each clean latent anew this many times, and take the mean gradient of the last step from there; 0
    takes the steps of the rollout. Each draw costs a forward and a decoding. The paper has 2."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also steps that the schedule does not have, and noise draws where they mean nothing."""
        yield from super().problems(plan, stage)
        if self.noise_draws and self.gradient_steps > 1:
            yield Reason(
                key=".gradient_steps",
                text=f"got {self.gradient_steps} with noise_draws={self.noise_draws}, expected 1: latents are noised "
                "to the level of the last step.",
            )
        yield from beyond_schedule(
            stage, reach=self.gradient_steps, key=".gradient_steps", got=str(self.gradient_steps)
        )
        if self.noise_draws:
            yield from outside_rectified_flow(stage, key=".noise_draws", advice="Use noise_draws=0.")
