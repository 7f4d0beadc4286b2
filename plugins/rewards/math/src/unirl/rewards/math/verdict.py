"""What became of one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Grader", "Outcome", "Verdict"]

Outcome = Literal["right", "wrong", "unparsed", "failed", "bad-key"]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    """`unparsed`: the text has no answer. `failed`: the grader did not come to an end. `bad-key`: the prompt's own
    answer is none that the method can read."""
    reason: str = ""
    """Why, as the end of a sentence, for `failed` and `bad-key`."""

    @staticmethod
    def of(is_right: bool) -> Verdict:
        return Verdict("right" if is_right else "wrong")


class Grader(Protocol):
    """One way to find an answer and to compare it."""

    def grade(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        """pairs: (the prompt's answer, what was generated). One verdict each, in order. From any thread."""
        ...

    def close(self) -> None:
        """End what was started. May be called twice."""
        ...
