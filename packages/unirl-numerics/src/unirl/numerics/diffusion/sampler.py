"""Converts the sampler of a latent track between its record and the kernel and guidance objects."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, cast

from unirl.core.types.track import Sampler
from unirl.numerics.diffusion.guidance import Guidance
from unirl.numerics.diffusion.kernels import KERNELS, Kernel, make_kernel

if TYPE_CHECKING:
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["guidance_of", "kernel_of", "sampler_of", "with_every_option"]


def sampler_of(kernel: Kernel, guidance: Guidance) -> Sampler:
    """The record of a kernel and a guidance; deterministic kernels have eta 0."""
    settings = {item.name: getattr(kernel, item.name) for item in dataclasses.fields(kernel) if item.init}
    eta = float(settings.pop("eta", 0.0))
    return Sampler(
        kernel=kernel.name,
        eta=eta,
        options=tuple(sorted(settings.items())),
        guidance_scale=float(guidance.scale),
        guidance_mode=guidance.mode,
    )


def kernel_of(sampler: Sampler) -> Kernel:
    """The kernel of a record. Raises ValueError for an unknown name or option."""
    return make_kernel(sampler.kernel, eta=sampler.eta, **dict(sampler.options))


def guidance_of(sampler: Sampler, *, latent_rank: int) -> Guidance:
    """The guidance of a record, for rollout and replay alike.

    latent_rank: dims of a batch of latents.  "norm-corrected" takes norms over the channels: the last dim of packed
    latents [B, tokens, C], dim 1 of [B, C, ...].  Raises ValueError for an unknown mode.
    """
    norm_dims = (-1,) if latent_rank == 3 else (1,)
    mode = cast(Literal["batched", "two-pass", "norm-corrected"], sampler.guidance_mode)
    return Guidance(scale=sampler.guidance_scale, mode=mode, norm_dims=norm_dims)


def with_every_option(sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    """The same settings with every option of the kernel named, as `sampler_of` names them.

    A kernel outside `KERNELS` keeps its options as they are; the engine decides whether it supports it.
    Raises ValueError for an unknown option, and for an invalid eta.
    """
    if sampling.kernel not in KERNELS:
        return sampling
    kernel = make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options)
    options = dict(sampler_of(kernel, Guidance()).options)
    return dataclasses.replace(sampling, kernel_options=options)
