"""Rows that a worker keeps where it generated them: for how long, and in what shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from unirl.core.specs.config import DataConfig, RunConfig
from unirl.core.types.request import Request
from unirl.core.types.track import LatentSegment, Track

__all__ = ["padded", "superseded"]


def superseded(
    kept: Iterable[tuple[int, str]], *, by: tuple[int, str], run: RunConfig, data: DataConfig
) -> list[tuple[int, str]]:
    """Rollout number and track of the tensors that no step needs once the rollout and track `by` is generated.

    Chunks and extra rounds arrive separately; off-policy runs still need earlier rollouts.
    """
    rollout, _ = by
    if run.max_staleness:
        return [key for key in kept if key[0] < rollout - run.max_staleness]
    comes_whole = not (run.reward_overlap_groups or data.dynamic_sampling_rounds)
    return [key for key in kept if key[0] != rollout or (key == by and comes_whole)]


def padded(track: Track, request: Request) -> Track:
    """The track padded to the most stored positions any share of the request may have, because remote rows are joined
    as they are. Groups with their own SDE steps, and samples with their own trained steps, store more or fewer
    positions."""
    segment = track.segment
    if not isinstance(segment, LatentSegment):
        return track
    sde = request.latent.sampling.sde
    if not sde.per_group and sde.train_fraction == 1:
        return track
    # Each of R steps has two positions, and the final one is kept as well.
    most = min(2 * int(segment.scored_steps.shape[1]) + 1, segment.num_steps + 1)
    return dataclasses.replace(track, segment=segment.with_slots(most))
