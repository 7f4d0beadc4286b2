"""Replies by request id, so that a request that is sent again is not scored again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ServiceError

__all__ = ["Replies"]

ENTRY_BYTES = 1024
"""Counted for a reply besides its own bytes: its id, its hash and the objects that hold them."""


@dataclass(kw_only=True)
class _Kept:
    content: bytes
    reply: asyncio.Future[bytes]
    until: float = 0.0
    size_bytes: int = 0


class Replies:
    """Replies in progress, and those of the last `keep_s` seconds within `max_bytes`. For one event loop."""

    def __init__(self, *, keep_s: float, max_bytes: int) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._in_progress: dict[str, _Kept] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.size_bytes = 0

    def get(
        self, request_id: str, content: bytes, start: Callable[[], asyncio.Future[bytes]]
    ) -> tuple[asyncio.Future[bytes], bool]:
        """The reply to a request, and whether it is an earlier one: kept, or in progress.

        content: hash of the body.  start: admits a new request; what it raises is not kept, and a reply that fails
        is forgotten, so that a retry is scored.
        Raises ServiceError for an id that other content had.
        """
        self._forget_old()
        kept = self._in_progress.get(request_id) or self._kept.get(request_id)
        if kept is not None:
            if kept.content != content:
                raise ServiceError("id_reused", f"id: got {request_id!r}, which a request of other content has.")
            return kept.reply, True
        reply = start()
        self._in_progress[request_id] = _Kept(content=content, reply=reply)
        reply.add_done_callback(lambda _: self._finish(request_id))
        return reply, False

    def _finish(self, request_id: str) -> None:
        done = self._in_progress.pop(request_id)
        if done.reply.cancelled() or done.reply.exception() is not None:
            return
        done.until = time.monotonic() + self._keep_s
        done.size_bytes = len(done.reply.result()) + ENTRY_BYTES
        self._kept[request_id] = done
        self.size_bytes += done.size_bytes
        self._forget_old()

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._kept and (next(iter(self._kept.values())).until <= now or self.size_bytes > self._max_bytes):
            self.size_bytes -= self._kept.popitem(last=False)[1].size_bytes
