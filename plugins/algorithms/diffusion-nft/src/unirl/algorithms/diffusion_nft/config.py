"""Settings of DiffusionNFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.specs.config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DiffusionNftConfig"]


@dataclass
class DiffusionNftConfig(PartConfig):
    beta: float = limit(1.0, above=0)
    """Guidance strength: the positive and the negative policy are this far from the lagged one, in units of the step
    from it to the trained one. The paper has 1, or 0.1 for OCR and several rewards."""
    num_points: int = limit(4, least=1)
    """Noise levels at which each sample is trained on, drawn anew for each; two forwards each, three with a KL
    penalty."""
    advantage_clip: float = limit(5.0, above=0)
    """An advantage A becomes the optimality r = clip(A, -c, c) / 2c + 1/2, between 0 and 1."""
    adaptive_weight: bool = True
    """Divide each squared error by its mean absolute error."""
    scale: float = limit(5.0, above=0)
    """Factor of the loss besides 1 / beta, as in the published code. Learning rates depend on it."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy, 1e-4 in the published code; 0 turns it
    off."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Sampling settings that have no meaning for the forward process, and a reference that lives elsewhere."""
        sampling = None if stage is None else stage.sampling
        if isinstance(sampling, LatentSamplingConfig) and sampling.is_guided:
            is_scaled = sampling.guidance_scale != 1.0
            key, expected = ("guidance_scale", "1") if is_scaled else ("guidance_mode", "'batched'")
            yield Reason(
                key=f"sampling.{key}",
                text=f"got {getattr(sampling, key)}, expected {expected}: DiffusionNFT trains the velocity without "
                "guidance; its samples must be made without it too.",
            )
        if isinstance(sampling, LatentSamplingConfig) and sampling.sde.train_fraction != 1:
            yield Reason(
                key="sampling.sde.train_fraction",
                text=f"got {sampling.sde.train_fraction}, expected 1: DiffusionNFT trains on clean latents, not on "
                "steps. Set algorithm.num_points instead.",
            )
        if plan is not None and plan.has_reference_workers and self.kl_coef:
            yield Reason(
                key="launcher.reference",
                text="got separate, but the KL penalty of DiffusionNFT asks for the reference policy at new points, on "
                "the train ranks. Use trainside, or algorithm.kl_coef=0.",
            )
