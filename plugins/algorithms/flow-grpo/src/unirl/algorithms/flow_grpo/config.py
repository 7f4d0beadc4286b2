"""Settings of Flow-GRPO. Fast, Dance, Mix and Guard are settings of it, of the SDE steps and of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.kl import KlConfig

__all__ = ["FlowGrpoConfig"]


@dataclass
class FlowGrpoConfig(KlConfig):
    clip_range: float = 1e-4
    """Clip of the ratio, which is of log-probs averaged over the latent's elements: 1e-4 here is 0.026 standard
    deviations of mean shift at 65,536 elements. Small latents want larger ones."""
    clip_range_high: float | None = None
    """Upper clip, when it differs from the lower one."""
    clip_schedule: str = "constant"
    """`constant`, `linear` or `cosine` over the run."""
    dual_clip: float | None = None
    """Bound of the loss of samples with negative advantage, as a multiple of it; above 1."""
    ratio_norm: bool = False
    """GRPO-Guard: take the negative bias out of the log-ratio and scale it by the step's noise."""
    step_weight: str = "uniform"
    """Weight of each SDE step: `uniform`; `inverse-dt`, 1/(sigma - sigma'), as GRPO-Guard has it; or `noise`, the
    step's noise level over the mean of its sample's steps, as TempFlow-GRPO has it."""
    drop_zero_advantage: bool = False
    """Leave samples without signal out of the average, so that the others weigh more."""
    kl_form: str = "gaussian"
    """`gaussian`, the true one; `flow-grpo-code` leaves out the step's length, for numbers published with that code."""
