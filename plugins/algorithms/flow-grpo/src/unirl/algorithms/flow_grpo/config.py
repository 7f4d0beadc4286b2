"""Settings of Flow-GRPO. Its variants Fast, Dance, Mix and Guard are set here, by the SDE steps and by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.loss.kl_config import KlConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["FlowGrpoConfig"]


@dataclass
class FlowGrpoConfig(KlConfig):
    clip_range: float = limit(1e-4, above=0, below=1)
    """Clip range of the ratio. Log-probs are averaged over the latent's elements, so 1e-4 here is a mean shift of 0.026
    standard deviations at 65,536 elements. Use larger values for small latents."""
    clip_range_high: float | None = limit(None, above=0)
    """Upper clip range, if it differs from the lower one."""
    clip_schedule: str = one_of("constant", "linear", "cosine", default="constant")
    """How the clip range changes over the run: `constant`, `linear` (falls to half) or `cosine` (falls to 0)."""
    dual_clip: float | None = limit(None, above=1)
    """Upper bound on the loss of samples with negative advantage, as a multiple of |advantage|; above 1 + the upper
    clip range."""
    ratio_norm: bool = False
    """GRPO-Guard: remove the negative bias of the log-ratio and scale it by the step's noise."""
    step_weight: str = one_of("uniform", "inverse-dt", "noise", default="uniform")
    """Weight of each SDE step: `uniform`; `inverse-dt`, 1/(sigma - sigma') (GRPO-Guard); `noise`, the step's noise
    level over the mean of its sample's steps (TempFlow-GRPO)."""
    drop_zero_advantage: bool = False
    """Leave samples with zero advantage out of the loss average, so that the others weigh more."""
    kl_form: str = one_of("gaussian", "flow-grpo-code", default="gaussian")
    """KL per step: `gaussian` is exact; `flow-grpo-code` omits the step length, to reproduce results of that code."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a dual clip inside the clip range, and log-probs without the constants that a term divides by."""
        yield from super().problems(plan, stage)
        least = 1 + (self.clip_range if self.clip_range_high is None else self.clip_range_high)
        if self.dual_clip is not None and self.dual_clip <= least:
            yield Reason(
                key=".dual_clip",
                text=f"got {self.dual_clip}, expected more than {least:g}, the upper clip, such as 3; or null.",
            )
        sampling = None if stage is None else stage.sampling
        if not isinstance(sampling, LatentSamplingConfig):
            return
        without_constants = sampling.kernel == "cps" and sampling.kernel_options.get("constants") is False
        if without_constants and (self.ratio_norm or self.kl_coef):
            yield Reason(
                key="sampling.kernel_options.constants",
                text="got false, which drops the constants of the log-prob that ratio_norm and kl_coef divide by; set "
                "it to true or turn those off.",
            )
