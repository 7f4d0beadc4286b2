"""Dividing work of any size: parts of about equal cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

__all__ = ["balance", "check_costs"]


def balance(costs: Sequence[float], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Rows of each part, such that the costliest part costs little more than it must.

    costs: of each row, >= 0: tokens, squared tokens, seconds.  Returns `parts` lists, some empty when rows are fewer.
    equal_counts: the numbers of rows differ by one at most, whatever that costs.
    Karmarkar and Karp's largest differencing; without equal_counts the costliest part is at most
    4/3 - 1/(3 parts) times the best possible (Michiels et al., 2007), the bound of longest-first as well, and mostly
    much nearer. Every row is in exactly one part, in order; parts are in order of their first row, empty ones last.
    The same costs give the same parts.

    Raises ValueError for parts below 1 or a cost that is negative or not finite.
    """
    if parts < 1:
        raise ValueError(f"balance: got {parts} parts, expected 1 or more.")
    check_costs("balance: cost", costs)
    order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    size = parts if equal_counts else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), size)):
        # A partial solution: `parts` pairs of cost and rows, most expensive first.
        pairs = [(float(costs[row]), [row]) for row in order[start : start + size]]
        pairs += [(0.0, list[int]()) for _ in range(parts - len(pairs))]
        heap.append((pairs[-1][0] - pairs[0][0], number, pairs))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        # The two with the widest spread: the most expensive part of one joins the cheapest of the other.
        *_, one = heapq.heappop(heap)
        *_, other = heapq.heappop(heap)
        pairs = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        pairs.sort(key=lambda pair: -pair[0])
        heapq.heappush(heap, (pairs[-1][0] - pairs[0][0], number, pairs))
        number += 1
    result = [sorted(rows) for _, rows in heap[0][2]] if heap else [list[int]() for _ in range(parts)]
    return sorted(result, key=lambda rows: rows[0] if rows else len(costs))


def check_costs(what: str, costs: Sequence[float]) -> None:
    """Raise ValueError for a cost that is negative or not finite. what: names it in the message."""
    for row, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"{what} of row {row} is {cost}; a finite number >= 0 is needed.")
