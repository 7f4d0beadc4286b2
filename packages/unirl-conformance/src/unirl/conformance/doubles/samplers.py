"""A kernel and a guidance as plugins bring them, for engines that promise to compute with those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from unirl.core.limits import limit
from unirl.core.types.inputs import Inputs
from unirl.numerics.diffusion.guidance import Guidance
from unirl.numerics.diffusion.kernels import OneStepKernel
from unirl.numerics.diffusion.transition import Coefficients, score_corrected_euler

__all__ = ["GUIDANCE", "KERNEL", "ComposedCfg", "ScaledSde"]

KERNEL = f"{__name__}:ScaledSde"
GUIDANCE = f"{__name__}:ComposedCfg"


@dataclass(frozen=True)
class ScaledSde(OneStepKernel):
    """The drift of `flow-sde` with g = factor eta: `dance-sde` at another noise level."""

    eta: float = 0.3
    factor: float = limit(2.0, above=0)

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        g = (0.0 * sigma) + self.factor * self.eta
        return score_corrected_euler(sigma, sigma_next=sigma_next, g=g)


@dataclass(frozen=True, kw_only=True)
class ComposedCfg(Guidance):
    """Three branches: towards the prompt, away from the negative prompt, both seen from the empty one.

    v_empty + scale (v_pos - v_empty) - away (v_neg - v_empty). Source: arXiv 2206.01714, equation 11.
    """

    away: float = limit(1.0, least=0)

    @property
    def branches(self) -> tuple[str, ...]:
        return ("positive", "negative", "empty")

    def inputs(self, branch: str, inputs: Inputs, *, negative_prompt: str) -> Inputs:
        if branch == "empty":
            return inputs.negative("")
        return super().inputs(branch, inputs, negative_prompt=negative_prompt)

    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        positive, negative, empty = (velocities[branch] for branch in self.branches)
        return empty + self.scale * (positive - empty) - self.away * (negative - empty)
