"""Checks of a plan's kernels and guidances that need their classes, which import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unirl.core.limits import Reason
from unirl.core.specs.capability import Cap
from unirl.core.specs.options import option_problems
from unirl.core.types.sampling import PLAIN_GUIDANCE, LatentSamplingConfig

from .guidance import GUIDANCES, Guidance, make_guidance
from .kernels import KERNELS, Kernel, OneStepKernel, make_kernel
from .named import class_of, options_of

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["is_one_step", "is_stochastic", "plan_problems", "sampler_problems"]


def plan_problems(plan: Plan) -> Iterator[Reason]:
    """Reasons against kernels, guidances and their options, in the sampling and the evaluation of each stage.

    Short names without options are left out: `unirl.core.match` checks those against the engine's spec.
    """
    for stage in plan.stages:
        key = f"sampling.{stage.name}" if len(plan.stages) > 1 else "sampling"
        given: set[str] = set()
        for where, sampling in ((key, stage.sampling), (f"eval.{key}", stage.evaluation)):
            if not isinstance(sampling, LatentSamplingConfig) or not _needs_classes(sampling, stage):
                continue
            reasons = [reason for reason in sampler_problems(sampling) if reason.text not in given]
            given |= {reason.text for reason in reasons}
            yield from (reason.under(where) for reason in reasons)
            if where == key and not reasons and stage.needs.stochastic and stage.algorithm is not None:
                yield from (reason.under(where) for reason in _noiseless(sampling, stage))


def _needs_classes(sampling: LatentSamplingConfig, stage: Stage) -> bool:
    """Whether the engine takes the names of these settings, and they are more than short names."""
    engine = stage.engine.spec
    takes_classes = Cap.PLUGIN_SAMPLERS in engine.capabilities
    for name, short in ((sampling.kernel, engine.kernels), (sampling.guidance_mode, engine.guidances)):
        if not takes_classes if ":" in name else name not in short:
            return False
    is_plain = ":" not in sampling.kernel and sampling.guidance_mode in PLAIN_GUIDANCE
    return not is_plain or bool(sampling.kernel_options or sampling.guidance_options)


def _noiseless(sampling: LatentSamplingConfig, stage: Stage) -> Iterator[Reason]:
    """A reason against a plugin's kernel without a stochastic step; short names are checked in `unirl.core.match`."""
    assert stage.algorithm is not None
    if ":" in sampling.kernel and not is_stochastic(sampling):
        yield Reason(
            key=".kernel",
            text=f"algorithm {stage.algorithm.name!r} takes ratios of log-probs; {sampling.kernel!r} is deterministic "
            f"with eta {sampling.eta} and these options.",
        )


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
