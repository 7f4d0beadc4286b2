"""Checks of scouts: cheap samples that choose which ones are drawn exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..specs.capability import Cap
from ..types.sampling import LatentSamplingConfig
from .wording import lacks

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["scouts"]

KEY, STEPS = "data.scouts.samples_per_prompt", "data.scouts.num_inference_steps"


def scouts(plan: Plan) -> Iterator[Reason]:
    """Yields a reason for each setting that keeps scouts from choosing samples."""
    count, steps = plan.data.scouts.samples_per_prompt, plan.data.scouts.num_inference_steps
    if not count:
        if steps:
            text = f"got {steps} without scouts; set {KEY} as well, or leave it out."
            yield Reason(key=STEPS, text=text)
        return
    for name in ("max_staleness", "reward_overlap_groups"):
        if value := getattr(plan.run, name):
            text = f"got {value} with {KEY}={count}; exact samples wait for the rewards of all scouts. Set one to 0."
            yield Reason(key=f"run.{name}", text=text)
    if len(plan.stages) > 1:
        names = ", ".join(stage.name for stage in plan.stages)
        yield Reason(key=KEY, text=f"got {count}, expected 0 in a recipe of several stages ({names}).")
        return
    if (why := _unfit(plan.only)) is not None:
        yield Reason(key=KEY, text=f"got {count}, but {why} Use 0.")
        return
    yield from _counts(plan, plan.only)
    yield from _sampled(plan.only)


def _unfit(stage: Stage) -> str | None:
    """Why no sample of a stage could be chosen by scouts."""
    if stage.kind != "latent":
        return f"track {stage.track!r} is text, which has no denoise steps to save."
    if stage.engine.spec.samples:
        return f"engine {stage.engine.name!r} reads stored samples and draws none."
    if stage.algorithm is not None and not stage.needs.compares_groups:
        return (
            f"algorithm {stage.algorithm.name!r} does not compare the rewards of a group, and would not use the choice."
        )
    return None


def _counts(plan: Plan, stage: Stage) -> Iterator[Reason]:
    given, exact = plan.data.scouts, stage.sampling
    assert isinstance(exact, LatentSamplingConfig)
    if given.samples_per_prompt <= stage.samples:
        own = f"stages.{stage.name}.samples" if stage.settings.samples else "data.samples_per_prompt"
        yield Reason(
            key=KEY,
            text=f"got {given.samples_per_prompt}, expected more than {stage.samples}, the samples to choose "
            f"({own}). Raise it, or lower that.",
        )
    key, most, steps = "sampling.num_inference_steps", exact.num_inference_steps - 1, given.num_inference_steps
    if not most:
        yield Reason(key=KEY, text=f"got {given.samples_per_prompt}, but {key}=1: no scout is cheaper. Use 0.")
    elif not 1 <= steps <= most:
        text = f"got {steps}, expected 1 to {most}, fewer steps than an exact sample takes ({key})."
        yield Reason(key=STEPS, text=text)
    elif not exact.sde.branch_steps and not any(exact.sde.problems(exact.num_inference_steps)):
        # Scouts have the noise of the exact samples; trees are refused as a whole.
        for reason in exact.sde.problems(steps):
            yield Reason(key=STEPS, text=f"got {steps}, which sampling.sde does not fit: {reason.text} Use more steps.")


def _sampled(stage: Stage) -> Iterator[Reason]:
    """Reasons against settings by which scouts differ from each other, or from the samples that they predict."""
    sampling = stage.sampling
    assert isinstance(sampling, LatentSamplingConfig)
    if sampling.sde.branch_steps:
        yield Reason(
            key="sampling.sde.branch_steps",
            text=f"got {sampling.sde.branch_steps}, which needs every path of a tree; scouts ({KEY}) choose some. "
            "Leave one of them out.",
        )
    elif sampling.same_initial_noise:
        yield Reason(
            key="sampling.same_initial_noise",
            text=f"got true, so all scouts of a prompt ({KEY}) would be the same sample. Set it to false, or use no "
            "scouts.",
        )
    yield from lacks(stage.engine.key, stage.engine.spec, Cap.INITIAL_NOISE, asks=KEY)
