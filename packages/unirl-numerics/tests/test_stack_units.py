"""Units stay whole in micro-batches, updates and ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_ranks import Alone, Pairs, Weighted, make_track, run, run_ranks
from unirl.core.errors import BatchError
from unirl.numerics.train.partition import micro_batches_by_rows, mini_batches

UNITS = ("a", "b", "a", "c", "b", "c", "d", "d")
"""Pairs whose rows are apart."""


def paired(track, units=UNITS):
    return dataclasses.replace(track, group_ids=("g",) * track.num_rows, unit_ids=tuple(units))


@pytest.mark.parametrize("micro_batch_size", [2, 3, 4, 7])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_no_split_that_keeps_units_changes_the_gradient(micro_batch_size, updates):
    whole, _ = run(paired(make_track()), Pairs(), updates=updates, rank=Alone(lr=0.1))
    algorithm, rank = Pairs(), Alone(lr=0.1)
    run(paired(make_track()), algorithm, updates=updates, micro_batch_size=micro_batch_size, rank=rank)
    for one, other in zip(rank.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # the weights are fp32
    for ids in algorithm.trained:
        assert len(ids) <= micro_batch_size
        units = [UNITS[int(name[1:])] for name in ids]
        assert all(units.count(unit) == 2 for unit in units)


@pytest.mark.parametrize(
    "rows", [([0, 2, 1, 4], [3, 5, 6, 7]), ([0, 2], [1, 4, 3, 5, 6, 7]), ([0, 2, 1, 4, 3, 5, 6, 7],)]
)
@pytest.mark.parametrize("micro_batch_size", [0, 2, 4])
def test_ranks_that_keep_units_do_not_change_the_gradient(rows, micro_batch_size):
    """A rank with fewer units repeats a whole one; one without any has padding."""
    track = paired(make_track())
    alone, _ = run(track, Pairs(), rank=Alone(lr=0.1))
    parts = [track.select(some) for some in rows]
    parts += [parts[0].padding([0, 1])] if len(parts) == 1 else []
    result = run_ranks(parts, algorithm=Pairs(), lr=0.1, micro_batch_size=micro_batch_size)
    assert result[0][0].calls == result[1][0].calls
    for rank, _ in result:
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)


def test_ranks_with_units_of_other_sizes_run_equally_many_forwards():
    """Four rows and one, of which the micro-batches of four hold two units on one rank and one on the other."""
    track = make_track()
    one = paired(track.select([0, 1, 2, 3]), "aabb")
    other = paired(track.select([4, 5, 6, 7]), "cccd")
    alone, _ = run(track, rank=Alone(lr=0.1))
    result = run_ranks([one, other], lr=0.1, micro_batch_size=3)
    assert result[0][0].calls == result[1][0].calls
    for rank, _ in result:
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)


def test_a_unit_stays_whole_when_one_of_its_rows_weighs_nothing():
    track = paired(make_track())
    weights = torch.ones(8)
    weights[[0, 6, 7]] = 0.0
    algorithm = Weighted()
    run(dataclasses.replace(track, sample_weights=weights), algorithm)
    assert algorithm.trained == [("s0", "s1", "s2", "s3", "s4", "s5")]


def test_a_unit_larger_than_a_micro_batch_is_refused_on_every_rank():
    track = paired(make_track())
    message = (
        "train.micro_batch_size: got 1, but unit 'a' of track 'image' has 2 rows, and a unit is never split. Use 2 or "
        "more."
    )
    with pytest.raises(BatchError) as caught:
        run(track, Pairs(), micro_batch_size=1)
    assert str(caught.value) == message
    single = dataclasses.replace(track.select([0]), unit_ids=("a",))
    result = run_ranks([single, track.select([1, 4])], micro_batch_size=1)
    assert all(isinstance(error, BatchError) for error in result)
    assert "another rank has a unit larger" in str(result[0])
    assert "unit 'b' of track 'image' has 2 rows" in str(result[1])


def test_more_updates_than_units_are_refused():
    with pytest.raises(BatchError, match=r"got 5 updates, but this rank has 4 units of track 'image'"):
        run(paired(make_track()), Pairs(), updates=5)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=20), st.integers(1, 6))
@settings(max_examples=200)
def test_every_unit_is_in_one_update_and_sizes_differ_by_at_most_a_unit(units, updates):
    groups, sizes = [str(group) for group, _ in units], [size for _, size in units]
    partition = mini_batches(groups, updates, sizes=sizes)
    assert len(partition) == updates
    assert sorted(unit for part in partition for unit in part) == list(range(len(units)))
    rows = [sum(sizes[unit] for unit in part) for part in partition]
    assert max(rows) - min(rows) <= max(sizes, default=0)
    if len(set(sizes)) <= 1:
        assert partition == mini_batches(groups, updates)
        # Round-robin over the groups one after the other.
        order = sorted(range(len(groups)), key=lambda unit: (groups.index(groups[unit]), unit))
        assert partition == [sorted(order[number::updates]) for number in range(updates)]


@given(st.lists(st.integers(0, 8), max_size=20), st.integers(0, 9))
@settings(max_examples=200)
def test_every_unit_is_whole_in_one_micro_batch(of_row, size):
    units = [[row for row, unit in enumerate(of_row) if unit == number] for number in dict.fromkeys(of_row)]
    batches = micro_batches_by_rows(units, size)
    assert sorted(row for batch in batches for row in batch) == list(range(len(of_row)))
    for unit in units:
        assert [set(unit) <= set(batch) for batch in batches].count(True) == 1
    for batch in batches:
        assert not size or len(batch) <= size or batch in units
    if len(units) == len(of_row):
        full = size or max(len(of_row), 1)
        assert batches == [list(range(len(of_row)))[start : start + full] for start in range(0, len(of_row), full)]
