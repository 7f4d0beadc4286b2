"""Checks of kernels and guidances that need their classes, which import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unirl.core.limits import Reason
from unirl.core.specs.overrides import option_problems
from unirl.core.types.sampling import LatentSamplingConfig

from .guidance import GUIDANCES, Guidance, make_guidance
from .kernels import KERNELS, Kernel, OneStepKernel, make_kernel
from .named import class_of, options_of

__all__ = ["is_one_step", "is_stochastic", "sampler_problems"]


def sampler_problems(sampling: LatentSamplingConfig) -> Iterator[Reason]:
    """Why the kernel or the guidance of these settings cannot be made; keys begin with a dot."""
    kernel, guidance = sampling.kernel, sampling.guidance_mode
    yield from _problems(
        lambda: class_of(kernel, known=KERNELS, base=Kernel, what="kernel"),
        lambda: make_kernel(kernel, eta=sampling.eta, **sampling.kernel_options),
        sampling.kernel_options,
        keys=(".kernel", ".kernel_options"),
        main="eta",
    )
    yield from _problems(
        lambda: class_of(guidance, known=GUIDANCES, base=Guidance, what="guidance"),
        lambda: make_guidance(guidance, scale=sampling.guidance_scale, **sampling.guidance_options),
        sampling.guidance_options,
        keys=(".guidance_mode", ".guidance_options"),
        main="scale",
    )


def is_stochastic(sampling: LatentSamplingConfig) -> bool:
    """Whether the kernel of these settings draws noise. Raises ValueError for one that cannot be made."""
    return make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options).is_stochastic


def is_one_step(sampling: LatentSamplingConfig) -> bool:
    """Whether a step of the kernel of these settings depends on x, v and the sigmas alone. Raises as above."""
    kernel = make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options)
    return isinstance(kernel, OneStepKernel)


def _problems(
    find: Callable[[], type[Any]],
    make: Callable[[], object],
    options: Mapping[str, Any],
    *,
    keys: tuple[str, str],
    main: str,
) -> Iterator[Reason]:
    """keys: of the name, and of the options."""
    try:
        cls = find()
    except ValueError as error:
        yield Reason(key=keys[0], text=str(error))
        return
    reasons = option_problems(cls, options, key=keys[1], names=options_of(cls, main=main))
    yield from reasons
    if not reasons:
        try:
            make()
        except ValueError as error:
            yield Reason(key=keys[1], text=str(error))
