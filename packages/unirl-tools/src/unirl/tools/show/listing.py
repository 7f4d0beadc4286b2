"""The samples of a step in order, stage by stage."""

from __future__ import annotations

from math import inf

from unirl.core.errors import RecipeError
from unirl.core.names import did_you_mean
from unirl.core.types.track import TextSegment, Track

from .facts import Facts, short_facts, sort_value, spread
from .saved_run import SavedRun, StepSamples

__all__ = ["step_lists"]


def step_lists(run: SavedRun, samples: StepSamples, *, stage: str | None, sort: str) -> list[Facts]:
    """The samples of each stage that has the key, or of this stage, by the key, rising; those without a value first.

    Raises RecipeError for a stage that the step does not have, and for a key that none of its stages has.
    """
    if stage is not None and stage not in samples.stages:
        known = ", ".join(samples.stages)
        raise RecipeError(f"--stage: got {stage!r}, expected one of {known}{did_you_mean(stage, samples.stages)}")
    chosen = [stage] if stage is not None else list(samples.stages)
    keys = {name: _keys(samples.stages[name].track) for name in chosen}
    if not any(sort in each for each in keys.values()):
        every = sorted({key for each in keys.values() for key in each})
        raise RecipeError(f"--sort: got {sort!r}, expected one of {', '.join(every)}{did_you_mean(sort, every)}")
    return [_listed(run, samples, name, sort=sort) for name in chosen if sort in keys[name]]


def _keys(track: Track) -> set[str]:
    """What the samples of a track can be sorted by."""
    own = {"length"} if isinstance(track.segment, TextSegment) else set[str]()
    return {"reward", "advantage", *own, *track.reward_parts}


def _listed(run: SavedRun, samples: StepSamples, stage: str, *, sort: str) -> Facts:
    every = [(sort_value(each, sort), short_facts(each)) for each in samples.of(stage)]
    every.sort(key=lambda item: -inf if item[0] is None else item[0])
    return {
        "run": run.name,
        "folder": str(run.folder),
        "step": samples.step,
        "steps": list(run.steps),
        "stage": stage,
        "num_samples": len(every),
        "reward": spread([facts["reward"] for _, facts in every if facts["reward"] is not None]),
        "samples": [{**facts, "sorted": value} for value, facts in every],
    }
