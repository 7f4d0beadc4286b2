"""Replies by request id, so that a request that is sent again is not scored again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ServiceError

__all__ = ["Replies"]

MOST = 100_000
"""Replies that are kept, whatever their age."""


@dataclass(kw_only=True)
class _Kept:
    content: bytes
    reply: asyncio.Future[bytes]
    until: float


class Replies:
    """Replies in progress and of the last `keep_s` seconds. For one event loop."""

    def __init__(self, *, keep_s: float) -> None:
        self._keep_s = keep_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def get(
        self, request_id: str, content: bytes, start: Callable[[], asyncio.Future[bytes]]
    ) -> tuple[asyncio.Future[bytes], bool]:
        """The reply to a request, and whether it is an earlier one: kept, or in progress.

        content: hash of the body.  start: admits a new request; what it raises is not kept, and a reply that fails
        is forgotten, so that a retry is scored.
        Raises ServiceError for an id that other content had.
        """
        self._forget_old()
        kept = self._kept.get(request_id)
        if kept is not None:
            if kept.content != content:
                raise ServiceError("id_reused", f"id: got {request_id!r}, which a request of other content has.")
            return kept.reply, True
        reply = start()
        self._kept[request_id] = _Kept(content=content, reply=reply, until=time.monotonic() + self._keep_s)
        reply.add_done_callback(lambda done: self._finish(request_id, done))
        return reply, False

    def _finish(self, request_id: str, reply: asyncio.Future[bytes]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            self._kept.pop(request_id, None)
        elif request_id in self._kept:
            self._kept[request_id].until = time.monotonic() + self._keep_s
            self._kept.move_to_end(request_id)

    def _forget_old(self) -> None:
        """Drop old replies, from the oldest on. One in progress holds back those after it for as long as it takes."""
        now = time.monotonic()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if not oldest.reply.done() or (oldest.until > now and len(self._kept) <= MOST):
                return
            self._kept.popitem(last=False)
