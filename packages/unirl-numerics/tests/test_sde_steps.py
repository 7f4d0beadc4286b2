"""Which steps are stochastic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.diffusion.sde_steps import select_sde_steps, select_train_steps

GROUPS = ["a", "a", "b", "b", "c"]


def select(**changes):
    return select_sde_steps(**{"num_steps": 10, "rollout": 0, "group_ids": GROUPS, "seed": 0, **changes})


def rows(found):
    assert found.dtype == np.int64
    return [list(row) for row in found]


def test_all_and_fraction_take_every_step_of_their_pool():
    assert rows(select(mode="all")) == [list(range(10))] * 5
    assert rows(select(mode="fraction", last=0.5)) == [[0, 1, 2, 3, 4]] * 5
    assert rows(select(mode="fraction", first=0.25, last=8)) == [[2, 3, 4, 5, 6, 7]] * 5
    # Flow-GRPO's 0.99 leaves out the last step.
    assert rows(select(mode="fraction", last=0.99)) == [list(range(9))] * 5
    # 0.57 * 100 is 56.99999999999999 in fp64, and means 57.
    assert rows(select(mode="fraction", last=0.57, num_steps=100))[0] == list(range(57))


def trained(fraction, *, rollout=0, rows=40, steps=range(9)):
    every = np.tile(np.array(list(steps), dtype=np.int64), (rows, 1))
    samples = [f"s{row}" for row in range(rows)]
    return select_train_steps(every, fraction=fraction, seed=0, rollout=rollout, sample_ids=samples)


def test_trained_steps_are_a_share_of_the_stochastic_ones_rounded_down():
    # DanceGRPO: 0.6 of 15 steps are 9; ours of 9 are 5.
    assert trained(0.6, steps=range(15)).shape == (40, 9)
    result = trained(0.6)
    assert result.dtype == np.int64 and result.shape == (40, 5)
    assert (np.diff(result, axis=1) > 0).all() and result.min() >= 0 and result.max() <= 8
    assert trained(0.01).shape == (40, 1)
    assert (trained(1.0) == np.arange(9)).all()
    assert set(trained(0.5, steps=[2, 5, 7, 8]).flatten()) == {2, 5, 7, 8}


def test_each_sample_draws_its_own_trained_steps_anew_each_rollout():
    result = [trained(0.6, rollout=rollout) for rollout in range(50)]
    assert all(
        (one == other).all() for one, other in zip(result, (trained(0.6, rollout=r) for r in range(50)), strict=True)
    )
    assert len({tuple(row) for row in result[0]}) > 20 and not (result[0] == result[1]).all()
    # A sample's draw depends on nothing else.
    assert (trained(0.6, rows=3) == result[0][:3]).all()
    # Each of 9 steps is drawn with p = 5/9: 2,000 draws have a standard deviation of 22; five of them are 111.
    counts = np.bincount(np.concatenate(result).flatten(), minlength=9)
    assert np.abs(counts - 2000 * 5 / 9).max() < 111
    # It is another draw than that of the stochastic steps.
    pool = select_sde_steps(mode="random", count=5, num_steps=9, rollout=0, group_ids=["s0"], seed=0)
    assert any((trained(0.6, rollout=r)[0] != pool[0]).any() for r in range(3))


def test_trained_steps_of_nothing_are_refused():
    for fraction in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=rf"train_steps: got fraction = {fraction}"):
            trained(fraction)
    with pytest.raises(ValueError, match=r"sde_steps \[40, 0\]"):
        trained(0.5, steps=[])


def test_fixed_steps_are_taken_as_they_are_in_rising_order():
    assert rows(select(mode="fixed", steps=(7, 0, 3))) == [[0, 3, 7]] * 5


def test_the_progressive_window_of_mixgrpo_moves_as_published():
    """w = 4, every 25 iterations, stride 1 (an overlap of 3), N = 25: [0, 4), [1, 5), ..., [21, 25), then again."""

    def start(rollout, **changes):
        (row, *_) = rows(
            select(mode="window", window=4, overlap=3, move_every=25, num_steps=25, rollout=rollout, **changes)
        )
        assert row == list(range(row[0], row[0] + 4))
        return row[0]

    assert [start(rollout) for rollout in (0, 24, 25, 49, 50, 524, 525)] == [0, 0, 1, 1, 2, 20, 21]
    assert start(550, roll_back=True) == 0
    assert start(10_000) == 21
    assert start(25 * 22 * 3 + 26, roll_back=True) == 1


def test_a_window_moves_by_its_width_less_the_overlap_and_stays_in_its_pool():
    starts = [
        rows(select(mode="window", window=2, move_every=1, first=1, last=8, rollout=rollout))[0][0]
        for rollout in range(5)
    ]
    assert starts == [1, 3, 5, 5, 5]


def test_random_steps_stay_in_the_pool_and_visit_all_of_it():
    result = np.concatenate([select(mode="random", count=3, first=2, last=9, rollout=r)[:1] for r in range(200)])
    assert set(result.flatten()) == set(range(2, 9))
    assert (np.diff(result, axis=1) > 0).all()
    # Each of 7 steps is drawn with p = 3/7: 200 draws have a standard deviation of 7, five of them are 35.
    counts = np.bincount(result.flatten(), minlength=9)[2:]
    assert np.abs(counts - 200 * 3 / 7).max() < 35


def test_a_random_window_visits_every_place_and_moves_each_rollout_unless_told():
    starts = [select(mode="window", strategy="random", window=3, last=5, rollout=r)[0, 0] for r in range(60)]
    assert set(starts) == {0, 1, 2}
    held = {select(mode="window", strategy="random", window=3, move_every=60, rollout=r)[0, 0] for r in range(60)}
    assert len(held) == 1


@given(
    st.permutations(range(5)),
    st.sampled_from([{"mode": "random", "count": 3}, {"mode": "window", "strategy": "random", "window": 2}]),
    st.booleans(),
    st.integers(0, 1000),
)
@settings(max_examples=40)
def test_a_group_shares_its_steps_wherever_its_rows_are(order, mode, per_group, rollout):
    chosen = select(**mode, per_group=per_group, rollout=rollout, group_ids=GROUPS)
    shuffled = select(**mode, per_group=per_group, rollout=rollout, group_ids=[GROUPS[i] for i in order])
    assert np.array_equal(shuffled, chosen[list(order)])
    for group in set(GROUPS):
        mine = [row for row, name in zip(chosen.tolist(), GROUPS, strict=True) if name == group]
        assert all(row == mine[0] for row in mine)
    if not per_group:
        assert (chosen == chosen[0]).all()


def test_groups_differ_when_asked_to():
    groups = [f"g{i}" for i in range(20)]
    result = select(mode="random", count=3, per_group=True, group_ids=groups)
    assert len({tuple(row) for row in result.tolist()}) > 1
    assert not np.array_equal(result, select(mode="random", count=3, per_group=True, group_ids=groups, seed=1))
    assert not np.array_equal(result, select(mode="random", count=3, per_group=True, group_ids=groups, rollout=1))


def test_no_samples_have_no_steps():
    assert select(mode="all", group_ids=[]).shape == (0, 10)
    assert select(mode="random", count=2, group_ids=[]).shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fixed", "steps": (3, 10)}, "step 10 is not among the 10 steps 0 to 9"),
        ({"mode": "fixed", "steps": (-1,)}, "step -1 is not among"),
        ({"mode": "fixed", "steps": (3, 3)}, "name a step twice"),
        ({"mode": "fixed"}, "has no steps"),
        ({"mode": "fraction", "first": 5, "last": 5}, "is empty"),
        ({"mode": "fraction", "last": 0.05}, "is empty"),
        ({"mode": "fraction", "last": 11}, "last = 11 is out of range"),
        ({"mode": "fraction", "last": 1.5}, "last = 1.5 is out of range"),
        ({"mode": "random"}, "count = None"),
        ({"mode": "random", "count": 0}, "count = 0"),
        ({"mode": "random", "count": 6, "last": 5}, "needs 1 to 5"),
        ({"mode": "window", "window": 11}, "a window of 11 does not fit into the 10 steps"),
        ({"mode": "window", "window": 4, "last": 3}, "does not fit"),
        ({"mode": "window", "window": 4, "overlap": 4}, "overlap = 4"),
        ({"mode": "window", "window": 4, "move_every": 0}, "move_every: got 0"),
        ({"mode": "window", "strategy": "decay"}, "strategy 'decay' is not known"),
        ({"mode": "window", "per_group": True}, "per_group needs random draws"),
        ({"mode": "all", "last": 5}, "takes no pool"),
        ({"mode": "some"}, "mode 'some' is not known"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        select(**changes)
