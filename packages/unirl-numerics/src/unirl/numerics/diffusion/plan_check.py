"""The check of a plan's kernels and guidances. torch is imported only for settings that need their classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from unirl.core.limits import Reason
from unirl.core.specs.capability import Cap
from unirl.core.types.sampling import PLAIN_GUIDANCE, LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["plan_problems"]


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
            from .sampler_check import sampler_problems

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
    from .sampler_check import is_stochastic

    assert stage.algorithm is not None
    if ":" in sampling.kernel and not is_stochastic(sampling):
        yield Reason(
            key=".kernel",
            text=f"algorithm {stage.algorithm.name!r} takes ratios of log-probs; {sampling.kernel!r} is deterministic "
            f"with eta {sampling.eta} and these options.",
        )
