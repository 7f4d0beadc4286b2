"""A worker keeps the tensors of each track of a rollout as long as a step needs them."""

from __future__ import annotations

import pytest
from unirl.core.specs.config import DataConfig, RunConfig
from unirl.launchers.ray.kept_rows import superseded


@pytest.mark.parametrize(
    ("run", "rounds", "by", "over"),
    [
        # The other track of the rollout stays; the evaluation, which repeats number 0, replaces its own.
        ({}, 0, (0, "text"), [(0, "text")]),
        ({}, 0, (1, "image"), [(0, "image"), (0, "text")]),
        # Pieces of one track are one rollout.
        ({"reward_overlap_groups": 2}, 0, (0, "text"), []),
        ({"reward_overlap_groups": 2}, 0, (1, "text"), [(0, "image"), (0, "text")]),
        # Rounds of dynamic sampling are one rollout as well.
        ({}, 2, (0, "image"), []),
        ({}, 2, (1, "image"), [(0, "image"), (0, "text")]),
        # Step 0 is trained on while rollout 2 is made with two ahead.
        ({"max_staleness": 2}, 0, (2, "image"), []),
        ({"max_staleness": 2}, 0, (3, "image"), [(0, "image"), (0, "text")]),
    ],
)
def test_tracks_of_a_rollout_are_kept_until_no_step_needs_them(
    run: dict[str, int], rounds: int, by: tuple[int, str], over: list[tuple[int, str]]
) -> None:
    kept = {(0, "image"): [1], (0, "text"): [2]}
    assert superseded(kept, by=by, run=RunConfig(**run), data=DataConfig(dynamic_sampling_rounds=rounds)) == over
