"""Parts of equal cost against the best there are, found by trying all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.balance import balance


def best(costs, parts):
    """The smallest possible cost of the costliest part, by trying all."""
    tried = itertools.product(range(parts), repeat=len(costs))
    return min(
        max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(parts))
        for places in tried
    )


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=60)
def test_the_costliest_part_is_within_the_proven_bound(costs, parts):
    result = balance(costs, parts)
    assert len(result) == parts and sorted(row for rows in result for row in rows) == list(range(len(costs)))
    costliest = max(sum(costs[row] for row in rows) for rows in result)
    assert costliest <= (4 / 3 - 1 / (3 * parts)) * best(costs, parts) + 1e-9  # 1e-9: the fraction in fp64


@given(st.lists(st.floats(0, 1e3), max_size=20), st.integers(1, 6))
@settings(max_examples=100)
def test_equal_counts_differ_by_one_at_most(costs, parts):
    result = balance(costs, parts, equal_counts=True)
    counts = [len(rows) for rows in result]
    assert sorted(row for rows in result for row in rows) == list(range(len(costs)))
    assert max(counts) - min(counts) <= 1
    assert result == balance(costs, parts, equal_counts=True)


def test_balance_by_hand():
    # {8|7} and {6|5} first, then 4 to the first: {7, 4|8}, then the two: 7 + 4 + 5 and 8 + 6.
    assert balance([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balance([4.0, 1.0, 1.0, 1.0, 1.0], 2) == [[0], [1, 2, 3, 4]]
    assert balance([4.0, 1.0, 1.0, 1.0], 2, equal_counts=True) == [[0, 3], [1, 2]]
    assert balance([1], 3) == [[0], [], []] and balance([], 2) == [[], []]
    with pytest.raises(ValueError, match="0 parts"):
        balance([1.0], 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cost of row 1"):
            balance([1.0, cost], 2)
