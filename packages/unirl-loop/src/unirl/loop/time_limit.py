"""A call of foreign code that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["TimeLimitReached", "within"]


class TimeLimitReached(Exception):
    """A call took longer than it may."""


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """The result of a call, or what it raises. Raises TimeLimitReached when it takes longer.

    The call runs on a thread that does not keep the process alive, and is left there when it hangs. Code that never
    lets go of the interpreter's lock cannot be left.
    """
    replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            replies.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            replies.put((None, error))

    threading.Thread(target=run, name="time-limit", daemon=True).start()
    try:
        result, error = replies.get(timeout=limit_s)
    except Empty:
        raise TimeLimitReached from None
    if error is not None:
        raise error
    return result
