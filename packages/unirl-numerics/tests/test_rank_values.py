"""Win rates and normal scores against pairwise comparisons by definition, and against scipy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm, rankdata
from unirl.numerics.loss.advantages import advantages, combine_rewards
from unirl.numerics.loss.rank_values import rank_values

SCORES = st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 7.0]), min_size=1, max_size=9)


def one_group(scores, kind):
    return rank_values(np.array(scores, dtype=np.float64), np.zeros(len(scores), dtype=np.int64), kind=kind)


def test_a_hand_made_group():
    """3 beats 1 and 2 and ties with 3: 2.5 of 3 comparisons. Ranks 1, 3.5, 2, 3.5 of 4 have the quantiles of k / 5."""
    assert one_group([1, 3, 2, 3], "win-rate").tolist() == [0, 2.5 / 3, 1 / 3, 2.5 / 3]
    # Normal quantiles of 1/5, 7/10 and 2/5, seven digits as in every table.
    expected = [-0.8416212, 0.5244005, -0.2533471, 0.5244005]
    assert one_group([1, 3, 2, 3], "normal-scores") == pytest.approx(expected, abs=6e-8)
    assert one_group([1, 3, 2, 3], "scores").tolist() == [1, 3, 2, 3]
    for kind, middle in (("win-rate", 0.5), ("normal-scores", 0.0)):
        assert one_group([4.0], kind).tolist() == [middle], "a group of one"
        assert one_group([4.0] * 3, kind).tolist() == [middle] * 3, "a group of equal scores"


@given(SCORES, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_win_rates_count_pairs_and_normal_scores_are_scipys(scores, random):
    """Three groups in any order of rows, with ties: pairs one by one, and scipy's ranks."""
    groups = [random.randrange(3) for _ in scores]
    groups = [sorted(set(groups)).index(group) for group in groups]
    wins = rank_values(np.array(scores), np.array(groups), kind="win-rate")
    normal = rank_values(np.array(scores), np.array(groups), kind="normal-scores")
    for row, (score, group) in enumerate(zip(scores, groups, strict=True)):
        others = [scores[i] for i in range(len(scores)) if groups[i] == group and i != row]
        won = sum(float(score > other) + 0.5 * (score == other) for other in others)
        # Halves of whole numbers are exact, and divided once.
        assert wins[row] == (won / len(others) if others else 0.5)
    for group in set(groups):
        rows = [row for row, each in enumerate(groups) if each == group]
        own = [scores[row] for row in rows]
        # The mean over the group is 1/2: of every pair, one wins or both have half. Up to 9 roundings.
        assert wins[rows].mean() == pytest.approx(0.5, abs=1e-15 * 9)
        # Two implementations of the quantile in fp64.
        expected = norm.ppf(rankdata(own, method="average") / (len(own) + 1))
        assert normal[rows] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_without_ties_win_rates_are_multiples_of_one_comparison():
    scores = np.random.default_rng(0).permutation(np.arange(12.0) ** 3)
    assert sorted(one_group(scores, "win-rate").tolist()) == [k / 11 for k in range(12)]


@pytest.mark.parametrize("kind", ["win-rate", "normal-scores"])
@pytest.mark.parametrize("mode", ["sum-then-normalize", "normalize-then-sum"])
def test_an_increasing_map_of_a_reward_changes_no_advantage(kind, mode):
    """Bit for bit, for each of two rewards by itself; with the scores themselves the widest scale decides."""
    generator = torch.Generator().manual_seed(1)
    one, two = torch.randn(2, 24, generator=generator, dtype=torch.float64)
    groups = [row % 5 for row in range(24)]

    def combined(one, two, kind):
        weights, values = {"one": 0.7, "two": 0.3}, {"one": kind, "two": kind}
        parts = {"one": one, "two": two}
        return combine_rewards(parts, weights=weights, group_ids=groups, mode=mode, values=values).values

    expected = combined(one, two, kind)
    assert torch.equal(combined(one.exp(), 1e6 * two**3 - 5, kind), expected)
    assert torch.equal(combined(-one.exp(), two, kind), combined(-one, two, kind))
    if mode == "sum-then-normalize":
        assert not torch.allclose(combined(one, 1e6 * two, "scores"), combined(one, two, "scores"))


def test_advantages_of_win_rates_are_those_of_the_win_rates():
    scores, groups = torch.tensor([0.1, 0.2, 0.3, 9.0, 5.0]), ["a", "a", "a", "a", "b"]
    options = {"group_ids": groups, "eps": 0.0}
    result = combine_rewards({"r": scores}, weights={"r": 1.0}, values={"r": "win-rate"}, **options)
    expected = advantages(torch.tensor([0, 1 / 3, 2 / 3, 1, 0.5], dtype=torch.float64), **options)
    # One rounding to fp32 each.
    torch.testing.assert_close(result.values, expected.values, rtol=1e-6, atol=0)
    assert result.values[4] == 0 and result.num_singleton_groups == 1
    # (-3, -1, 1, 3) / sqrt(5) for any four different scores.
    expected = torch.tensor([-3.0, -1, 1, 3]) / math.sqrt(5)
    torch.testing.assert_close(result.values[:4], expected, rtol=1e-6, atol=0)


def test_only_the_named_rewards_are_ranked():
    scores, penalty = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, -0.5])
    options = {"group_ids": ["g"] * 3, "normalize": False}
    weights = {"r": 1.0, "overlong": 1.0}
    result = combine_rewards(
        {"r": scores, "overlong": penalty}, weights=weights, values={"r": "win-rate"}, **options
    ).values
    # Win rates 1, 0, 1/2, less the penalty: 1, 0, 0, less their mean of 1/3. One rounding to fp32.
    torch.testing.assert_close(result, torch.tensor([2 / 3, -1 / 3, -1 / 3]), rtol=1e-6, atol=1e-7)


def test_rows_of_weight_0_are_compared_with_nobody_and_nan_is_refused():
    scores = torch.tensor([1.0, math.nan, 3.0, 100.0])
    options = {"weights": {"r": 1.0}, "values": {"r": "win-rate"}, "normalize": False}
    result = combine_rewards(
        {"r": scores}, group_ids=["g"] * 4, row_weights=torch.tensor([1.0, 0, 1, 0]), **options
    ).values
    assert result.tolist() == [-0.5, 0, 0.5, 0]
    with pytest.raises(ValueError, match=r"rewards\['r'\]: sample 1 has nan"):
        combine_rewards({"r": scores}, group_ids=["g"] * 4, **options)
    nobody = combine_rewards({"r": scores}, group_ids=["g"] * 4, row_weights=torch.zeros(4), **options)
    assert nobody.values.tolist() == [0.0] * 4


def test_another_kind_of_values_is_refused():
    with pytest.raises(ValueError, match="values 'elo' is not known; known are scores, win-rate, normal-scores"):
        one_group([1.0, 2.0], "elo")
