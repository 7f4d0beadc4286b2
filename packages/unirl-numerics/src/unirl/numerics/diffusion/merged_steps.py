"""Merges a stochastic step that adds little noise with the steps after it."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.numerics.diffusion.kernels import Kernel, OneStepKernel

__all__ = ["merged_steps"]


def merged_steps(kernel: Kernel, sigmas: Tensor, *, step: int, std: float) -> Tensor:
    """The schedule in which `step` ends at the first later sigma where its noise has a standard deviation of `std`.

    sigmas: [T + 1], falling to 0.  Returns [T + 1 - K], without the K sigmas that the step passes over. It never ends
    at 0: its noise would be in the sample.
    Raises ValueError for a kernel whose noise depends on more than the sigmas, and for a step that cannot have as much.
    Source: E-GRPO, arXiv 2601.00423, section 3.3.1. Its threshold is on exp(h) = sqrt(2 pi e) std, h being the entropy
    of the step's noise for each element of the latent (equation 10), so 2.2 there is a `std` of 0.532.
    """
    if not isinstance(kernel, OneStepKernel):
        raise ValueError(
            f"sampling.sde.min_noise_std: got {std} with kernel '{kernel.name}', expected a OneStepKernel."
        )
    ends = sigmas[step + 1 : -1].float()
    # The sigma after the first one stands in for 1, whichever that becomes.
    first = ends if step == 0 else sigmas[1].float()
    stds = kernel.coefficients(sigmas[step].float().expand_as(ends), sigma_next=ends, sigma_max=first).std
    enough = [place for place, value in enumerate(stds) if float(value) >= std]
    if not enough:
        most = f"{float(stds.max()):.3g}" if len(stds) else "no"
        raise ValueError(
            f"sampling.sde.min_noise_std: got {std}; step {step} of {len(sigmas) - 1} has {most} noise at most, merged "
            "with any number of the steps after it but the last. Lower it, raise sampling.eta, or leave the step out "
            "(sampling.sde.last)."
        )
    return torch.cat([sigmas[: step + 1], sigmas[step + 1 + enough[0] :]])
