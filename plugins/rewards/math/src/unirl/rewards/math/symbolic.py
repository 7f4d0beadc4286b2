"""Symbolic equality by math-verify, in worker processes; plain integers are compared in this process."""

from __future__ import annotations

import re

from .tex import last_box
from .verdict import Verdict
from .worker_pool import Job, WorkerPool

__all__ = ["SymbolicGrader"]

TAIL = 4000
"""Characters at the end of a text in which math-verify looks for an answer without a box. What its patterns cost grows
with the square of the text's numbers, and no final answer is thousands of characters before the end."""
_INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})\.?")
_EXPRESSION = re.compile(r"[0-9$\\\[]")
"""One of these is in everything that math-verify takes from a text: a digit, or the start of mathematics in TeX."""


class SymbolicGrader:
    r"""The answer that math-verify finds in the last \boxed{...}, or by its own rules in a text without one, is equal
    to the key in its sense: as a number to six decimals, expression, equation, set, interval or matrix.

    A percentage equals its number and its fraction: 50\% is 50 and 1/2.
    """

    def __init__(self, pool: WorkerPool, *, needs_box: bool) -> None:
        self._pool = pool
        self._needs_box = needs_box

    def grade(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        jobs = [(_bare(key), *self._candidate(text)) for key, text in pairs]
        # Answers often repeat within a group.
        verdicts = {job: _integers(job) for job in jobs}
        hard = [job for job, verdict in verdicts.items() if verdict is None]
        solved = self._solved(hard) if hard else {}
        return [verdicts[job] or solved[job] for job in jobs]

    def close(self) -> None:
        self._pool.close()

    def _solved(self, jobs: list[Job]) -> dict[Job, Verdict]:
        """Verdicts of the workers. Where one failed, the key is tried alone: if that fails too, it was the key."""
        solved = dict(zip(jobs, self._pool.grade(jobs), strict=True))
        failed = [job for job, verdict in solved.items() if verdict.outcome == "failed"]
        keys = list(dict.fromkeys(key for key, _, _ in failed))
        alone = dict(zip(keys, self._pool.grade([(key, "", True) for key in keys]), strict=True))
        for job in failed:
            if alone[job[0]].outcome == "failed":
                solved[job] = Verdict("bad-key", f"math-verify cannot read: reading it {alone[job[0]].reason}")
        return solved

    def _candidate(self, text: str) -> tuple[str, bool]:
        """Text with the answer, and whether it is the answer itself rather than a text that contains it."""
        box = last_box(text)
        if box is not None:
            return box, True
        if self._needs_box:
            return "", True
        text = text.strip()
        return text[-TAIL:], False


def _bare(key: str) -> str:
    """The prompt's answer without the box or the dollars around it."""
    box = last_box(key)
    return (key if box is None else box).strip().strip("$").strip()


def _integers(job: Job) -> Verdict | None:
    """The verdict where the key is a plain integer, and the answer is one too or there is none; else None."""
    key, answer, is_bare = job
    if not _INTEGER.fullmatch(key):
        return None
    if not answer or (not is_bare and answer.isascii() and not _EXPRESSION.search(answer)):
        return Verdict("unparsed")
    answer = answer.strip("$").strip()
    if not _INTEGER.fullmatch(answer):
        return None
    return Verdict.of(_value(answer) == _value(key))


def _value(text: str) -> int:
    return int(text.rstrip(".").replace(",", ""))
