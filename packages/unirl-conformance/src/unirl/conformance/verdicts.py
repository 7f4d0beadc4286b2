"""How a claim ends besides passing and failing, and the numbers that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import pytest

__all__ = ["STATES", "NotApplicable", "NotRun", "Number", "Record", "State"]

State = Literal["pass", "fail", "gap", "n/a", "not run"]
"""`gap`: it fails as the spec declares. `n/a`: the spec promises nothing of the kind. `not run`: something is absent
here, a GPU or a package; nothing is known."""
STATES: tuple[State, ...] = get_args(State)

# pytest's `skip.Exception` is the type that ends a test without a failure, also in fixtures.
_Skipped = pytest.skip.Exception


class NotApplicable(_Skipped):
    """The claim means nothing for this subject; the message is the sentence that says why."""


class NotRun(_Skipped):
    """The claim could not be tried here: a GPU or a package is absent. Reported as not run, never as passed."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A measured number of a claim with the bound that it was held against."""

    name: str
    value: float
    bound: float | None = None


class Record:
    """The numbers that a claim records."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []

    def __call__(self, name: str, value: float, *, bound: float | None = None) -> None:
        """Keep a number. With a bound, fails the claim when |value| is above it or not a number."""
        self.numbers.append(Number(name=name, value=float(value), bound=bound))
        if bound is not None:
            assert abs(float(value)) <= bound, f"{name} is {float(value):.6g}; at most {bound:.6g} is allowed"
