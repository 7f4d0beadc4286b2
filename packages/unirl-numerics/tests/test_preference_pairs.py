"""Preference pairs of samples, against groups that are sorted by their rewards."""

from __future__ import annotations

import pytest
import torch
from test_kept_samples import a_track
from unirl.core.specs.config import AdvantageConfig
from unirl.numerics.train.preference_pairs import losers_of, with_pairs

REWARDS = {"one": 1.0}


def test_a_clip_makes_no_equals_of_a_pair() -> None:
    """With `normalize: false` advantages are differences of rewards, most of which a clip of 5 bounds."""
    generator = torch.Generator().manual_seed(4)
    config = AdvantageConfig(normalize=False, clip=5.0)
    for _ in range(50):
        rewards = (100 * torch.rand(6, generator=generator)).tolist()
        track, numbers = with_pairs(a_track(rewards, ["g"] * 6), config, reward_weights=REWARDS, pairs_per_group=3)
        assert numbers["pairs"] == 3
        ranked = sorted(range(6), key=lambda row: rewards[row])
        losers, weights = losers_of(track)
        for place in range(3):
            winner, loser = ranked[5 - place], ranked[place]
            assert int(losers[winner]) == loser and float(weights[winner]) == 1.0, rewards


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_pairs_are_made_of_the_samples_that_are_kept(order: list[int]) -> None:
    """Ties are broken by sample id."""
    track = a_track([0.0, 2.0, 0.0, 1.0, 2.0], ["g"] * 5).select(order)
    config = AdvantageConfig(keep_best=1, keep_worst=2)
    result, numbers = with_pairs(track, config, reward_weights=REWARDS, pairs_per_group=2)
    assert sorted(result.sample_ids) == ["g/0", "g/2", "g/4"] and numbers["pairs"] == 1
    pairs = [sorted(result.sample_ids[row] for row in rows) for rows in result.units() if len(rows) == 2]
    assert pairs == [["g/0", "g/4"]]
