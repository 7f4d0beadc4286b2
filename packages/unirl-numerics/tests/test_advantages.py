"""Advantages against golden vectors and hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, Track
from unirl.numerics.loss.advantages import advantages, combine_rewards
from unirl.numerics.train.track_advantages import track_advantages

ONE_GROUP = ["g"] * 4
# Golden vectors have six digits.
GOLDEN = 6e-7


def values(rewards, group_ids=ONE_GROUP, **options):
    return advantages(torch.tensor(rewards), group_ids=group_ids, **options).values


def close(found, expected, tolerance=GOLDEN):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([0.0, 1, 1, 0], {"ddof": 1, "eps": 1e-6}, [-0.866024, 0.866024, 0.866024, -0.866024]),
        ([2.0, 4, 6, 8], {"ddof": 1, "eps": 1e-6}, [-1.161895, -0.387298, 0.387298, 1.161895]),
        ([0.0, 1, 1, 0], {"normalize": False}, [-0.5, 0.5, 0.5, -0.5]),
        ([2.0, 4, 6, 8], {"normalize": False}, [-3.0, -1.0, 1.0, 3.0]),
        ([0.0, 1, 1, 0], {"normalize": False, "leave_one_out": True}, [-2 / 3, 2 / 3, 2 / 3, -2 / 3]),
        ([2.0, 4, 6, 8], {"normalize": False, "leave_one_out": True}, [-4.0, -4 / 3, 4 / 3, 4.0]),
    ],
    ids=["grpo", "grpo 2", "dr-grpo", "dr-grpo 2", "rloo", "rloo 2"],
)
def test_one_group_gives_the_golden_numbers(rewards, options, expected):
    close(values(rewards, **options), expected)


def test_the_std_may_come_from_the_whole_batch():
    """Flow-GRPO: centred per group, divided by the population std of all rewards."""
    rewards, groups = [0.0, 2, 10, 14], ["a", "a", "b", "b"]
    std = math.sqrt(sum((r - 6.5) ** 2 for r in rewards) / 4)
    close(values(rewards, groups, scope="global"), [x / (std + 1e-4) for x in (-1, 1, -2, 2)])
    bessel = math.sqrt(sum((r - 6.5) ** 2 for r in rewards) / 3)
    close(values(rewards, groups, scope="global", ddof=1), [x / (bessel + 1e-4) for x in (-1, 1, -2, 2)])
    whitened = [(r - 6.5) / (std + 1e-4) for r in rewards]
    close(values(rewards, groups, scope="global", center="global"), whitened)


def test_clipping_comes_last():
    close(values([0.0, 0, 0, 10], normalize=False, clip=5.0), [-2.5, -2.5, -2.5, 5.0])


@given(st.permutations(range(7)))
@settings(max_examples=20)
def test_ragged_groups_in_any_order(order):
    rewards = [1.0, 3, 5, 7, 9, 4, 8]
    groups = ["a", "a", "b", "b", "b", "c", "c"]
    expected = [-1, 1, -2, 0, 2, -2, 2]
    result = values([rewards[i] for i in order], [groups[i] for i in order], normalize=False)
    close(result, [float(expected[i]) for i in order])


def test_groups_without_signal_are_exactly_0_and_counted():
    # The mean of three times 0.1 is not 0.1 in floating point.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 2.0])
    groups = ["same", "same", "same", "alone", "pair", "pair"]
    for options in ({}, {"ddof": 1}, {"scope": "global"}, {"leave_one_out": True}, {"eps": 0.0}, {"normalize": False}):
        result = advantages(rewards, group_ids=groups, **options)
        assert result.values[:4].tolist() == [0.0] * 4
        assert result.values[4] < 0 < result.values[5]
        assert (result.num_groups, result.num_zero_spread_groups, result.num_singleton_groups) == (3, 1, 1)


def test_global_centring_gives_groups_without_spread_their_due():
    result = advantages(torch.tensor([1.0, 1, 3, 3]), group_ids=["a", "a", "b", "b"], scope="global", center="global")
    close(result.values, [-1.0, -1, 1, 1], 2e-4)  # eps = 1e-4 in the denominator
    assert result.num_zero_spread_groups == 2
    assert advantages(torch.ones(4), group_ids=ONE_GROUP, scope="global", center="global").values.tolist() == [0.0] * 4


def test_rows_of_weight_0_take_no_part():
    rewards = torch.tensor([1.0, float("nan"), 3.0, 100.0, 7.0])
    weights = torch.tensor([1.0, 0, 1, 0, 1])
    groups = ["a", "a", "a", "a", "b"]
    for scope in ("group", "global"):
        result = advantages(rewards, group_ids=groups, weights=weights, scope=scope, eps=0.0)
        kept = advantages(rewards[[0, 2, 4]], group_ids=["a", "a", "b"], scope=scope, eps=0.0)
        assert torch.equal(result.values[[0, 2, 4]], kept.values)
        assert result.values[[1, 3]].tolist() == [0.0, 0.0]
        assert (result.num_groups, result.num_singleton_groups) == (2, 1)
    nothing = advantages(rewards, group_ids=groups, weights=torch.zeros(5))
    assert nothing.values.tolist() == [0.0] * 5 and nothing.num_groups == 0


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12),
    st.floats(-50, 50),
    st.integers(-3, 6),
)
@settings(max_examples=50)
def test_adding_a_constant_or_scaling_by_a_power_of_two_changes_nothing(rewards, offset, exponent):
    groups = ["g"] * len(rewards)
    base = torch.tensor(rewards, dtype=torch.float64)
    spread = float(base.max() - base.min())
    if 0 < spread < 1e-2:
        return  # the offset would swallow the spread
    result = advantages(base, group_ids=groups, eps=0.0).values
    moved = advantages(base * 2.0**exponent + offset, group_ids=groups, eps=0.0).values
    # fp64 throughout, with numbers of up to 6,400 against a spread of at least 1e-2 / 8.
    torch.testing.assert_close(moved, result, rtol=0, atol=1e-6)


def test_two_rewards_can_be_summed_before_or_after_normalising():
    """With R1 = [0,1,0,1] and R2 = [0,0,100,100], halves: the sum is decided by R2 alone."""
    parts = {"first": torch.tensor([0.0, 1, 0, 1]), "second": torch.tensor([0.0, 0, 100, 100])}
    options = {"weights": {"first": 0.5, "second": 0.5}, "group_ids": ONE_GROUP, "eps": 0.0}
    close(
        combine_rewards(parts, **options).values,
        [-1.00995, -0.98995, 0.98995, 1.00995],
        1e-5,  # five digits
    )
    close(combine_rewards(parts, mode="normalize-then-sum", **options).values, [-1.0, 0, 0, 1])
    # Divided by the standard deviation of these, the root of a half.
    close(combine_rewards(parts, mode="normalize-sum-normalize", **options).values, [-(2**0.5), 0, 0, 2**0.5])
    clipped = combine_rewards(parts, mode="normalize-then-sum", clip=0.25, **options)
    close(clipped.values, [-0.25, 0, 0, 0.25])


def test_what_rewards_disagree_on_is_subtracted_times_their_spread():
    """Weights 1 and 3: the mean of [0, 4] is 3 and its variance (9 + 3 x 1) / 4 = 3, so the spread is 4 times the root of
    3. A weight of -1 turns a reward round: [1, -1] then agree."""
    parts = {"a": torch.tensor([0.0, 2, 2, 2]), "b": torch.tensor([4.0, 2, 2, 6])}
    options = {"weights": {"a": 1.0, "b": 3.0}, "group_ids": ONE_GROUP, "eps": 0.0}
    root = 4 * 3**0.5
    # The sums are 12, 8, 8 and 20; the last sample's rewards are as far apart as the first one's.
    less = torch.tensor([12 - 0.5 * root, 8, 8, 20 - 0.5 * root], dtype=torch.float64)
    expected = advantages(less, group_ids=ONE_GROUP, eps=0.0).values
    close(combine_rewards(parts, spread_penalty=0.5, **options).values, expected.tolist())
    assert torch.equal(
        combine_rewards(parts, spread_penalty=0.5, shaping=["b"], **options).values,
        combine_rewards(parts, **options).values,
    )
    opposed = {"a": torch.tensor([1.0, 0, 3, 0]), "b": torch.tensor([-1.0, 0, -3, 0])}
    agreed = combine_rewards(opposed, weights={"a": 1.0, "b": -1.0}, group_ids=ONE_GROUP, spread_penalty=9.0).values
    torch.testing.assert_close(agreed, combine_rewards(opposed, weights={"a": 1, "b": -1}, group_ids=ONE_GROUP).values)


@pytest.mark.parametrize("penalty", [-0.5, float("nan")])
def test_a_penalty_that_would_reward_disagreement_is_refused(penalty):
    with pytest.raises(ValueError, match=r"spread_penalty = .*; expected 0 or more"):
        combine_rewards({"a": torch.ones(4)}, weights={"a": 1}, group_ids=ONE_GROUP, spread_penalty=penalty)


def test_the_spread_of_advantages_is_centred_as_they_are():
    """Advantages [-1, 1, -1, 1] and [-1, -1, 1, 1]: sums -2, 0, 0, 2, spreads 2 x (0, 1, 1, 0), whose mean is 1."""
    parts = {"a": torch.tensor([0.0, 1, 0, 1]), "b": torch.tensor([0.0, 0, 10, 10])}
    options = {"weights": {"a": 1.0, "b": 1.0}, "group_ids": ONE_GROUP, "eps": 0.0, "spread_penalty": 0.5}
    close(combine_rewards(parts, mode="normalize-then-sum", **options).values, [-1.5, -0.5, -0.5, 2.5])


@pytest.mark.parametrize(("other", "weight"), [([5.0, 5, 3, 4], 1.0), ([5.0, 6, 3, 4], 0.0)])
def test_a_combined_group_is_without_spread_when_every_part_with_a_weight_is(other, weight):
    parts = {"a": torch.tensor([1.0, 1, 1, 2]), "b": torch.tensor(other)}
    groups = ["x", "x", "y", "y"]
    for mode in ("sum-then-normalize", "normalize-then-sum", "normalize-sum-normalize"):
        result = combine_rewards(parts, weights={"a": 1.0, "b": weight}, group_ids=groups, mode=mode)
        assert result.num_zero_spread_groups == 1
        assert result.values[:2].tolist() == [0.0, 0.0]


def test_one_reward_of_weight_1_is_that_reward():
    rewards = torch.tensor([2.0, 4, 6, 9])
    for mode in ("sum-then-normalize", "normalize-then-sum"):
        result = combine_rewards({"r": rewards}, weights={"r": 1.0}, group_ids=ONE_GROUP, mode=mode)
        assert torch.equal(result.values, advantages(rewards, group_ids=ONE_GROUP).values)


def test_what_makes_no_sense_is_refused():
    bad = torch.tensor([1.0, 2, float("nan"), float("inf")])
    with pytest.raises(ValueError, match="sample 2 has nan, and 2 in all"):
        advantages(bad, group_ids=ONE_GROUP)
    with pytest.raises(ValueError, match=r"rewards\['b'\]: sample 2 has nan"):
        combine_rewards({"a": torch.ones(4), "b": bad}, weights={"a": 1, "b": 1}, group_ids=ONE_GROUP)
    with pytest.raises(ValueError, match=r"rewards are \['a'\], weights are for \['b'\]"):
        combine_rewards({"a": torch.ones(4)}, weights={"b": 1}, group_ids=ONE_GROUP)
    with pytest.raises(ValueError, match="4 rewards but 3 group ids"):
        advantages(torch.ones(4), group_ids=["a"] * 3)
    with pytest.raises(ValueError, match="scope 'rank' is not known"):
        advantages(torch.ones(4), group_ids=ONE_GROUP, scope="rank")
    with pytest.raises(ValueError, match="divide a zero-variance group by eps alone"):
        advantages(torch.ones(4), group_ids=ONE_GROUP, center="global")
    with pytest.raises(ValueError, match="mode 'product' is not known"):
        combine_rewards({"a": torch.ones(4)}, weights={"a": 1}, group_ids=ONE_GROUP, mode="product")
    for bounds in ({"eps": math.nan}, {"eps": -1.0}, {"clip": -1.0}, {"clip": math.nan}):
        with pytest.raises(ValueError, match=r"advantages: eps = .*, clip = .*; expected"):
            advantages(torch.arange(4.0), group_ids=ONE_GROUP, **bounds)
    for weight in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"weights\['a'\] = (nan|inf); expected a finite number"):
            combine_rewards({"a": torch.arange(4.0)}, weights={"a": weight}, group_ids=ONE_GROUP)
    with pytest.raises(ValueError, match="numbers >= 0"):
        advantages(torch.ones(4), group_ids=ONE_GROUP, weights=-torch.ones(4))


def test_the_weights_of_the_step_come_before_those_of_the_recipe() -> None:
    """With weights 1 and 0 the advantages are those of the first reward, whatever is missing of the second."""
    one, two = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([5.0, math.nan, 1.0, 0.0])
    track = Track(
        name="t",
        sample_ids=tuple("abcd"),
        group_ids=("g",) * 4,
        inputs=Inputs.of_texts([""] * 4),
        metadata=({},) * 4,
        reward_parts={"one": one, "two": two},
        reward_weights={"one": 1.0, "two": 0.0},
        sample_weights=torch.ones(4),
        status=(Status.COMPLETED,) * 4,
        policy_version=(0,) * 4,
    )
    for combine in ("sum-then-normalize", "normalize-then-sum"):
        config = AdvantageConfig(combine=combine, eps=0.0, clip=None)
        result, _ = track_advantages(track, config, reward_weights={"one": 0.5, "two": 0.5})
        # (x - 1.5) / sqrt(1.25); one rounding to fp32.
        expected = (one - 1.5) / math.sqrt(1.25)
        torch.testing.assert_close(result.advantages, expected, rtol=1e-6, atol=0)
