"""Converts the sampler of a latent track between its record and the kernel and guidance objects."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from unirl.core.types.track import Sampler
from unirl.numerics.diffusion.guidance import Guidance, make_guidance
from unirl.numerics.diffusion.kernels import KERNELS, Kernel, OneStepKernel, make_kernel
from unirl.numerics.diffusion.transition import Coefficients

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["guidance_of", "kernel_of", "sampler_of", "schedule_coefficients", "with_every_option"]


def sampler_of(kernel: Kernel, guidance: Guidance) -> Sampler:
    """The record of a kernel and a guidance; deterministic kernels have eta 0."""
    settings, guided = _settings(kernel), _settings(guidance)
    eta, scale = float(settings.pop("eta", 0.0)), float(guided.pop("scale"))
    return Sampler(
        kernel=kernel.name,
        eta=eta,
        options=tuple(sorted(settings.items())),
        guidance_scale=scale,
        guidance_mode=guidance.name,
        guidance_options=tuple(sorted(guided.items())),
    )


def kernel_of(sampler: Sampler) -> Kernel:
    """The kernel of a record. Raises ValueError for an unknown name or option."""
    return make_kernel(sampler.kernel, eta=sampler.eta, **dict(sampler.options))


def guidance_of(sampler: Sampler) -> Guidance:
    """The guidance of a record, for rollout and replay alike. Raises ValueError for an unknown name or option."""
    return make_guidance(sampler.guidance_mode, scale=sampler.guidance_scale, **dict(sampler.guidance_options))


def schedule_coefficients(sampler: Sampler, sigmas: Tensor) -> Coefficients:
    """The numbers of every step of a schedule, [T] each, for the record of a kernel.

    sigmas: [T + 1], falling.  A function of these two alone, so the same for every split of a batch.
    Raises ValueError for a kernel whose step depends on more than x, v and the sigmas (not a `OneStepKernel`).
    """
    kernel = kernel_of(sampler)
    if not isinstance(kernel, OneStepKernel):
        raise ValueError(f"kernel '{sampler.kernel}': got {type(kernel).__name__}, expected a OneStepKernel.")
    return kernel.coefficients(sigmas[:-1], sigma_next=sigmas[1:], sigma_max=sigmas[1])


def with_every_option(sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    """The same settings with every option of kernel and guidance named, as `sampler_of` names them.

    A short name of a kernel outside `KERNELS` keeps its options as they are; the engine decides whether it supports it.
    Raises ValueError for a name that leads to nothing, an unknown option, and an invalid eta or scale.
    """
    if sampling.kernel in KERNELS or ":" in sampling.kernel:
        settings = _settings(make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options))
        settings.pop("eta", None)
        sampling = dataclasses.replace(sampling, kernel_options=dict(sorted(settings.items())))
    settings = _settings(
        make_guidance(sampling.guidance_mode, scale=sampling.guidance_scale, **sampling.guidance_options)
    )
    settings.pop("scale")
    return dataclasses.replace(sampling, guidance_options=dict(sorted(settings.items())))


def _settings(part: Kernel | Guidance) -> dict[str, Any]:
    """Name -> value of everything that the part was made with."""
    return {item.name: getattr(part, item.name) for item in dataclasses.fields(part) if item.init}
