"""How states, numbers, times and counts read, the same in the terminal, in MATRIX.md and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..claims import SubjectKind
from ..verdicts import Number, State

__all__ = [
    "KIND_TITLES",
    "MEANINGS",
    "ORDER",
    "PARTLY",
    "SEVERITY",
    "SYMBOLS",
    "against_bound",
    "count_of",
    "duration",
    "number",
    "share_of_bound",
    "short_number",
]

ORDER: tuple[State, ...] = ("pass", "fail", "gap", "not run", "n/a")
"""Order in which states are shown beside each other."""

SEVERITY: tuple[State, ...] = ("fail", "not run", "gap", "pass", "n/a")
"""The state of several outcomes together is the first of these that occurs: what did not run is never a pass."""

SYMBOLS: Mapping[State, str] = {"pass": "✓", "fail": "✗", "gap": "△", "not run": "○", "n/a": "–"}
PARTLY = "◐"
"""Several outcomes of which some passed and the others did not run."""

MEANINGS: Mapping[State, str] = {
    "pass": "tested, and the claim holds",
    "fail": "tested, and the claim does not hold",
    "gap": "known not to hold; the part declares it with a reason",
    "not run": "something is missing, such as a GPU or a package; nothing is known",
    "n/a": "the part does not declare the capability, or the parts are incompatible",
}

KIND_TITLES: Mapping[SubjectKind, str] = {
    "model": "Models",
    "engine": "Engines, with each model",
    "algorithm": "Algorithms",
    "backend": "Backends",
    "cell": "Combinations of model, engine, algorithm and backend",
    "reward": "Rewards",
    "environment": "Environments",
    "tracker": "Trackers",
    "launcher": "Launchers",
    "transport": "Transports",
    "plugin": "Plugins, as packages",
}
"""Kinds of subjects in the order of a report: numbers about parts first, packaging last."""


def number(value: float) -> str:
    """`0`, `0.25`, `2.4e-07`, `12,345`: three significant digits and more only for whole numbers."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.3g}"


def short_number(value: float) -> str:
    """`0`, `2e-7`, `0.3`: one significant digit, for cells of a table."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.1g}" if abs(value) < 1 else f"{value:.0f}"
    digits, _, exponent = f"{value:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"


def share_of_bound(one: Number) -> float | None:
    """|value| / bound; infinite for what is not a number or is above a bound of 0; None without a bound."""
    if one.bound is None:
        return None
    if math.isnan(one.value):
        return math.inf
    if one.bound == 0:
        return 0.0 if one.value == 0 else math.inf
    return abs(one.value) / one.bound


def against_bound(one: Number) -> str:
    """`2.4e-07 (at most 1e-05)`, `0.31 (over 1e-05)`, or the value alone without a bound."""
    share = share_of_bound(one)
    if one.bound is None or share is None:
        return number(one.value)
    return f"{number(one.value)} ({'at most' if share <= 1 else 'over'} {number(one.bound)})"


def duration(seconds: float) -> str:
    """`7 ms`, `12.3 s`, `3 min 05 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def count_of(count: int, one: str, many: str = "") -> str:
    """`1 claim`, `2 claims`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
