"""Training on the best and the worst samples of each group, against sorted groups by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, Track
from unirl.numerics.train.track_advantages import track_advantages

NONE = float("nan")


def a_track(rewards: Sequence[float], groups: Sequence[str], *, weights: Sequence[float] | None = None) -> Track:
    counts = dict.fromkeys(groups, 0)
    ids = list[str]()
    for group in groups:
        ids.append(f"{group}/{counts[group]}")
        counts[group] += 1
    return Track(
        name="t",
        sample_ids=tuple(ids),
        group_ids=tuple(groups),
        inputs=Inputs.of_texts([""] * len(ids)),
        metadata=({},) * len(ids),
        reward_parts={"one": torch.tensor(rewards, dtype=torch.float64)},
        sample_weights=torch.tensor(weights or [1.0] * len(ids)),
        status=(Status.COMPLETED,) * len(ids),
        policy_version=(0,) * len(ids),
    )


def kept(track: Track, **options: object) -> tuple[Track, dict[str, float]]:
    config = AdvantageConfig(**options)  # type: ignore[arg-type]
    return track_advantages(track, config, reward_weights={"one": 1.0})


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]), min_size=1, max_size=14),
    best=st.integers(0, 4),
    worst=st.integers(0, 4),
    data=st.data(),
)
@settings(max_examples=60)
def test_the_best_and_the_worst_of_each_group_are_left_with_the_advantages_of_the_whole_group(
    rewards: list[float], best: int, worst: int, data: st.DataObject
) -> None:
    """Ragged groups with ties, in any order of the rows."""
    groups = [data.draw(st.sampled_from("abc")) for _ in rewards]
    track = a_track(rewards, groups)
    everyone, _ = kept(track)
    result, numbers = kept(track, keep_best=best, keep_worst=worst)
    if not best + worst:
        assert result.sample_ids == track.sample_ids and "samples_kept" not in numbers
        return
    of = dict(zip(track.sample_ids, rewards, strict=True))
    expected = set[str]()
    for group in set(groups):
        ranked = sorted((i for i in of if i.startswith(group)), key=lambda i: (of[i], i))
        low = ranked[:worst]
        expected |= {*low, *[i for i in ranked[::-1] if i not in low][:best]}
        assert len([i for i in result.sample_ids if i.startswith(group)]) == min(best + worst, len(ranked))
    assert set(result.sample_ids) == expected
    assert list(result.sample_ids) == [i for i in track.sample_ids if i in expected], "rows keep their order"
    assert numbers["samples_kept"] == len(expected)
    assert everyone.advantages is not None and result.advantages is not None
    whole = dict(zip(everyone.sample_ids, everyone.advantages.tolist(), strict=True))
    assert result.advantages.tolist() == [whole[i] for i in result.sample_ids]


def test_of_binary_rewards_as_many_of_each_have_the_largest_variance() -> None:
    """Max-variance down-sampling, arXiv 2504.13818: a subset of the highest and the lowest rewards has the largest
    variance of all subsets of its size, which is checked over every subset."""
    rewards = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    result, _ = kept(a_track(rewards, ["g"] * 8), keep_best=2, keep_worst=2)
    chosen = [rewards[int(i.split("/")[1])] for i in result.sample_ids]
    largest = max(float(torch.tensor(subset).var(correction=0)) for subset in itertools.combinations(rewards, 4))
    assert float(torch.tensor(chosen).var(correction=0)) == largest == 0.25


def test_samples_beyond_the_clip_are_told_from_each_other() -> None:
    track = a_track([0.0, 30.0, 40.0, 20.0, 0.0, 0.0], ["g"] * 6)
    result, _ = kept(track, keep_best=1, normalize=False, clip=1.0)
    assert result.sample_ids == ("g/2",)
    assert result.advantages is not None and result.advantages.tolist() == [1.0]


def test_a_group_without_a_best_keeps_as_many_with_advantage_0() -> None:
    """Every group has the same share of the update; its sample ids decide, not the order of the rows."""
    track = a_track([3.0] * 5 + [1.0, 2.0, 3.0, 4.0], ["same"] * 5 + ["spread"] * 4)
    for order in (range(9), range(8, -1, -1)):
        result, numbers = kept(track.select(list(order)), keep_best=1, keep_worst=1)
        assert sorted(result.sample_ids) == ["same/0", "same/4", "spread/0", "spread/3"]
        assert numbers["zero_spread_groups"] == 1 and numbers["groups"] == 2
        assert result.advantages is not None
        values = dict(zip(result.sample_ids, result.advantages.tolist(), strict=True))
        assert values["same/0"] == values["same/4"] == 0 and values["spread/0"] < 0 < values["spread/3"]


def test_failed_samples_are_not_chosen_and_a_rollout_of_them_is_left_as_it_is() -> None:
    rewards, groups = [math.nan, 1.0, 5.0, math.nan, math.nan], ["a", "a", "a", "b", "b"]
    result, _ = kept(a_track(rewards, groups, weights=[0, 1, 1, 0, 0]), keep_best=2, keep_worst=2)
    assert result.sample_ids == ("a/1", "a/2"), "fewer than asked for, and none of a group that failed"
    failed, numbers = kept(a_track(rewards, groups, weights=[0.0] * 5), keep_best=1)
    assert failed.num_rows == 5 and numbers["samples_kept"] == 0


def test_positive_advantages_are_multiplied_by_the_scores_of_a_reward() -> None:
    """Centred rewards [-2, -1, 0, 1, 2]; equation 8 of GARDO leaves those up to 0 as they are, and clips come after."""
    factors = torch.tensor([0.5, 9.0, 9.0, 0.25, 4.0])
    track = a_track([0.0, 1.0, 2.0, 3.0, 4.0], ["g"] * 5)
    track = dataclasses.replace(track, reward_parts={**track.reward_parts, "far": factors})
    options = {"normalize": False, "positive_factor": "far"}
    for clip, last in ((None, 8.0), (5.0, 5.0)):
        result, numbers = kept(track, clip=clip, **options)
        assert result.advantages is not None and result.advantages.tolist() == [-2, -1, 0, 0.25, last]
        assert numbers["positive_factor_mean"] == (0.25 + 4) / 2
    best, _ = kept(
        dataclasses.replace(track, reward_parts={**track.reward_parts, "far": 1 / factors}), keep_best=1, **options
    )
    assert best.sample_ids == ("g/3",), "1 x 4 is more than 2 / 4"
    unknown = torch.tensor([1.0, 1.0, 1.0, 1.0, NONE])
    result, _ = kept(dataclasses.replace(track, reward_parts={**track.reward_parts, "far": unknown}), **options)
    assert result.advantages is not None and result.advantages.tolist() == [-2, -1, 0, 1, 0]


@pytest.mark.parametrize("values", ["win-rate", "normal-scores"])
def test_the_recipe_chooses_what_advantages_are_computed_from(values: str) -> None:
    """Ranks of 4 samples: win rates 0 to 1 in thirds, and normal scores that are symmetric about 0."""
    track = a_track([0.1, 0.2, 0.3, 90.0], ["g"] * 4)
    result, _ = kept(track, values=values, eps=0.0)
    assert result.advantages is not None
    advantages = result.advantages.tolist()
    assert advantages[0] == pytest.approx(-advantages[3], rel=1e-6)
    assert advantages[1] == pytest.approx(-advantages[2], rel=1e-6)
    if values == "win-rate":
        assert advantages[3] == pytest.approx(3 / math.sqrt(5), rel=1e-6)
    else:
        # Quantiles of 3/5 and 4/5 are 0.2533471 and 0.8416212 in every table.
        assert advantages[3] / advantages[2] == pytest.approx(0.8416212 / 0.2533471, rel=1e-6)
