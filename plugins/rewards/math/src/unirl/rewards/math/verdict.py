"""Outcome of grading one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Grader", "Outcome", "Verdict"]

Outcome = Literal["right", "wrong", "unparsed", "failed", "bad-key"]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    """`unparsed`: the completion has no answer. `failed`: the grader timed out or crashed. `bad-key`: the method
    cannot read the prompt's reference answer."""
    reason: str = ""
    """Why, as the end of a sentence, for `failed` and `bad-key`."""

    @staticmethod
    def of(is_right: bool) -> Verdict:
        return Verdict("right" if is_right else "wrong")


class Grader(Protocol):
    """One way to extract and compare an answer."""

    def grade(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        """pairs: (reference answer, completion). Returns one verdict each, in order. Thread-safe."""
        ...

    def close(self) -> None:
        """Stop all worker processes. May be called twice."""
        ...
