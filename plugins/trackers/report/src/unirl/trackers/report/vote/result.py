"""The result of votes: counts, and the win rate of the second of two runs with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from .votes_file import Votes

__all__ = ["WinRate", "result_facts", "result_lines", "win_rate"]

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """Share of the votes for one side, in [0, 1], and the interval around it."""

    rate: float
    low: float
    high: float


def win_rate(*, wins: int, ties: int, losses: int) -> WinRate:
    """Win rate with ties counted as half, and its 95 % interval.

    The interval is Wilson's: with p = (wins + ties / 2) / n, all q with |p - q| <= z sqrt(q (1 - q) / n). A vote is
    then worth 0, 1/2 or 1, whose variance is at most that of a coin of the same mean, so ties make it no narrower than
    it should be. Votes count as independent.

    Raises ValueError without votes.
    Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927), 209-212.
    """
    count = wins + ties + losses
    if min(wins, ties, losses) < 0 or count == 0:
        raise ValueError(f"got {wins} wins, {ties} ties and {losses} losses, expected at least one vote.")
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    rate = (wins + ties / 2) / count
    middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    # Rounding could leave [0, 1], where the interval ends at one of them.
    return WinRate(rate=rate, low=max(0.0, middle - half), high=min(1.0, middle + half))


def result_facts(votes: Votes) -> dict[str, Any]:
    """Counts of the votes; of two runs also the win rate of the second one, None without votes."""
    cast = votes.cast
    first = sum(vote.preferred == 0 for vote in cast)
    second = sum(vote.preferred == 1 for vote in cast)
    facts = {
        "runs": [str(run.folder) for run in votes.runs],
        "votes": len(cast),
        "ties": len(cast) - first - second,
        "left": sum(vote.preferred == vote.left for vote in cast),
    }
    if len(votes.runs) == 1:
        return facts
    rate = win_rate(wins=second, ties=facts["ties"], losses=first) if cast else None
    interval = None if rate is None else [rate.low, rate.high]
    return {**facts, "preferred": [first, second], "win_rate": rate and rate.rate, "interval": interval}


def result_lines(votes: Votes) -> Sequence[str]:
    """The result as lines of text."""
    facts = result_facts(votes)
    decided = facts["votes"] - facts["ties"]
    lines = [f"{facts['votes']} votes, {facts['ties']} of them ties; left preferred in {facts['left']} of {decided}"]
    if len(votes.runs) == 2:
        lines += [
            f"{count} for {name} ({votes.runs[at].folder})"
            for at, (name, count) in enumerate(zip("AB", facts["preferred"], strict=True))
        ]
        if facts["votes"]:
            low, high = facts["interval"]
            lines.append(
                f"B wins {facts['win_rate']:.1%}, ties counted as half; 95 % interval {low:.1%} to {high:.1%} (Wilson)"
            )
    return lines
