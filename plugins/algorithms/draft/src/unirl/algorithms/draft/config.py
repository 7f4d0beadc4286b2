"""Settings of DRaFT and ReFL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.specs.config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DraftConfig", "ReflConfig"]


@dataclass
class DraftConfig(PartConfig):
    gradient_steps: int = limit(1, least=1)
    """K: the last denoise steps that the gradient goes through."""
    noise_draws: int = limit(0, least=0)
    """DRaFT-LV: noise each clean latent anew this many times, and take the mean gradient of the last step from there; 0
    takes the steps of the rollout. Each draw costs a forward and a decoding."""
    stop_window: int = limit(1, least=1)
    """Denoising stops at one of this many last steps, drawn for each training step, and its velocity leads straight to
    the clean latent. 1 is the last step of the schedule."""
    reward_limit: float | None = None
    """The loss is max(limit - reward, 0), so samples beyond the limit have no gradient. None is no limit: the loss is
    -reward. ReFL's paper takes 2 for rewards of mean 0 and deviation 1."""
    checkpointing: bool = True
    """Recompute the activations of each denoise step in the backward pass instead of keeping those of all K."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Steps that the schedule does not have, and noise draws where they mean nothing."""
        if self.noise_draws and self.gradient_steps > 1:
            yield Reason(
                key=".gradient_steps",
                text=f"got {self.gradient_steps} with noise_draws={self.noise_draws}, expected 1: latents are noised "
                "to the level of the last step.",
            )
        sampling = None if stage is None else stage.sampling
        if not isinstance(sampling, LatentSamplingConfig):
            return
        asked, steps = self.gradient_steps + self.stop_window - 1, sampling.num_inference_steps
        if asked > steps:
            yield Reason(
                key=".gradient_steps",
                text=f"got {self.gradient_steps} with stop_window={self.stop_window}, which reach back {asked} steps; "
                f"expected at most sampling.num_inference_steps={steps}.",
            )
        if self.noise_draws and sampling.kernel == "ddim-eta":
            yield Reason(
                key=".noise_draws",
                text="got kernel ddim-eta, expected a kernel of rectified flow, whose forward process noises the "
                "latents. Use noise_draws=0.",
            )


@dataclass
class ReflConfig(DraftConfig):
    stop_window: int = limit(10, least=1)
    """Denoising stops at one of this many last steps, drawn for each training step, and its velocity leads straight to
    the clean latent. The paper draws from the last 10 of 40."""
