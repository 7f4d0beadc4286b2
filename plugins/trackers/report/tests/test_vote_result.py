"""The win rate of `unirl vote` and its interval, and what a result says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from unirl.trackers.report.vote.result import result_facts, result_lines, win_rate
from unirl.trackers.report.vote.votes_file import Vote, VotedRun, Votes


@pytest.mark.parametrize(
    ("wins", "count", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]
)
def test_the_interval_is_that_of_a_published_table(wins: int, count: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3: to four digits."""
    result = win_rate(wins=wins, ties=0, losses=count - wins)
    assert (round(result.low, 4), round(result.high, 4)) == (low, high)
    mirrored = win_rate(wins=count - wins, ties=0, losses=wins)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - result.high, 1 - result.low), abs=1e-12)


@pytest.mark.parametrize(("wins", "ties", "losses"), [(10, 5, 3), (0, 7, 0), (1, 0, 0), (40, 20, 0)])
def test_the_ends_of_the_interval_are_where_a_coin_would_be_z_away(wins: int, ties: int, losses: int) -> None:
    """|p - q| = z sqrt(q (1 - q) / n), with the 0.975 quantile of the normal distribution to 12 digits."""
    result = win_rate(wins=wins, ties=ties, losses=losses)
    count = wins + ties + losses
    assert result.rate == (2 * wins + ties) / (2 * count)
    for end in (result.low, result.high):
        # An end at 0 or 1 is one to rounding.
        distance = 1.959963984540 * math.sqrt(max(0.0, end * (1 - end)) / count)
        assert abs(result.rate - end) == pytest.approx(distance, abs=1e-7)


def test_no_votes_have_no_win_rate() -> None:
    with pytest.raises(ValueError, match="got 0 wins, 0 ties and 0 losses"):
        win_rate(wins=0, ties=0, losses=0)


@pytest.mark.parametrize("is_of_two", [True, False])
def test_the_result_says_who_won(is_of_two: bool) -> None:
    runs = tuple(VotedRun(folder=Path(name), began=1.0) for name in ("one", "other")[: 1 + is_of_two])
    preferred = [1] * 10 + [0] * 3 + [None] * 5
    cast = tuple(
        Vote(key=("p", str(at), ""), files=("a", "b"), left=0, preferred=choice, number=at)
        for at, choice in enumerate(preferred)
    )
    votes = Votes(runs=runs, seed=0, cast=cast, num_recorded=18)
    # p = 12.5 / 18; by hand, with z = 1.96: (0.69444 + 0.10671 +- 0.23806) / 1.21341.
    of_two = (
        "3 for A (one)",
        "10 for B (other)",
        "B wins 69.4%, ties counted as half; 95 % interval 46.4% to 85.6% (Wilson)",
    )
    counts = "18 votes, 5 of them ties; left preferred in 3 of 13"
    assert tuple(result_lines(votes)) == (counts, *(of_two if is_of_two else ()))


def test_without_votes_there_is_no_win_rate_yet() -> None:
    runs = tuple(VotedRun(folder=Path(name), began=1.0) for name in ("one", "other"))
    votes = Votes(runs=runs, seed=0, cast=(), num_recorded=0)
    facts = result_facts(votes)
    assert facts["win_rate"] is None and facts["interval"] is None and len(result_lines(votes)) == 3
