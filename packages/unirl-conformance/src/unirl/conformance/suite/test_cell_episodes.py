"""Episodes: what an environment says is read, and never trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.cell import LINEAR, CellCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import Observation
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Track

SAID = "no, again"


class Again:
    """Refuses the first answer of each episode, and takes the second one."""

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        self._waiting = set(inputs.ids)
        return [Observation()] * inputs.num_rows

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        told = {name: Observation(text=SAID, done=name not in self._waiting) for name in answers}
        self._waiting -= answers.keys()
        return told

    def close(self) -> None:
        """Nothing is held."""


@claim("cell", needs={"model": (Cap.OBSERVATIONS,), "engine": (Cap.LOG_PROBS_TOKEN,)}, track="text")
def test_observations_get_no_gradient(case: CellCase) -> None:
    """NaN log-probs at the tokens of observations leave the update unchanged: these tokens are neither trained on, nor
    part of a mean, a ratio or a penalty.

    If it fails: leave out the tokens that `TextSegment.mask` marks before values meet (`torch.where`): 0 x NaN is NaN.
    """
    if case.algorithm.needs.log_probs == "none":
        raise NotApplicable(f"algorithm {case.algorithm.name!r} takes no log-probs")
    moved: list[dict[str, Tensor]] = []
    for poison in (0.0, math.nan):
        with case.cell(train=TrainConfig(old_log_probs="engine"), **LINEAR) as cell:
            track = cell.episodes(Again(), step=0)
            masks = track.text.mask
            assert masks is not None and not all(bool(mask.all()) for mask in masks), "no episode has an observation"
            before = cell.weights()
            cell.train(cell.with_advantages(_poisoned(track, poison)))
            moved.append({name: value - before[name] for name, value in cell.weights().items()})
    clean, poisoned = moved
    assert any(bool(value.any()) for value in clean.values()), "the update moved nothing"
    gaps = [float((clean[name] - poisoned[name]).abs().max()) for name in clean]
    case.record("moved by what observations hold", float(torch.tensor(gaps).max()), bound=0.0)


def _poisoned(track: Track, value: float) -> Track:
    """The track with this log-prob at every token of an observation."""
    segment = track.text
    assert segment.mask is not None and segment.log_probs is not None
    rows = zip(segment.log_probs, segment.mask, strict=True)
    log_probs = tuple(row.masked_fill(~mask, value) for row, mask in rows)
    return dataclasses.replace(track, segment=dataclasses.replace(segment, log_probs=log_probs))
