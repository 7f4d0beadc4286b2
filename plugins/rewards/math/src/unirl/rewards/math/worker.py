"""A process that grades with math-verify: one JSON request a line on stdin, one JSON reply a line on stdout.

It has a main thread to itself, so that a clock of the kernel can end it: CPU time counts, whatever Python or sympy is
doing, and what one answer gets does not depend on how busy the machine is. A process that ran into its limit
is not used again: a parser that was interrupted may take every later answer for none. It ends when stdin does.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from .tex import plain_tex, split_percent

__all__ = ["main"]

MEMORY_BYTES = 4 * 2**30
"""Address space. A power tower asks for more than any machine has."""


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # math-verify warns that its own alarms are off; they swallow what they interrupt.
    logging.disable(logging.WARNING)
    _reply(replies, _ready())
    for line in sys.stdin:
        request = json.loads(line)
        # Unhandled, SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        try:
            outcome, reason = _grade(request["key"], request["answer"], is_bare=request["is_bare"])
        except Exception as error:  # noqa: BLE001 - the other side gets it, as the verdict on this one answer
            outcome, reason = "failed", f"raised {type(error).__name__}: {str(error)[:200]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, {"outcome": outcome, "reason": reason})


def _ready() -> dict[str, str]:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def _reply(replies: Any, reply: dict[str, str]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _grade(key: str, answer: str, *, is_bare: bool) -> tuple[str, str]:
    from math_verify import verify

    expected = _read(key)
    if not any(not isinstance(result, str) for result in expected):
        return "bad-key", "is not an expression that math-verify can read; `method=exact` or `boxed` compare words"
    result = _read(answer) if is_bare else _search(answer)
    # math-verify adds what it could not parse as a string; that is not an answer.
    if not any(not isinstance(item, str) for item in result):
        return "unparsed", ""
    is_right = verify(expected, result, timeout_seconds=None, raise_on_error=True)
    return ("right" if is_right else "wrong"), ""


def _read(answer: str) -> list[Any]:
    """An answer that stands alone."""
    from math_verify import LatexExtractionConfig, parse

    bare, is_percent = split_percent(plain_tex(answer).strip().rstrip(".").strip())
    if not bare:
        return []
    # Percent signs are understood behind the dollars alone.
    tex = f"${bare}$%" if is_percent else f"\\boxed{{{bare}}}"
    target = LatexExtractionConfig(boxed_match_priority=0)
    return parse(tex, (target,), parsing_timeout=0, raise_on_error=True)


def _search(text: str) -> list[Any]:
    """The answer in a text, by math-verify's own rules."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(plain_tex(text), targets, parsing_timeout=0, raise_on_error=True)


if __name__ == "__main__":
    main()
