"""HTTP connections with limits on heads, bodies and replies, all of which hold before a key has been seen."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import STATUS

__all__ = ["ConnectionLimits", "protocol"]

HEAD_BYTES = 16 * 1024
"""Longest head of a request."""
PIECE_BYTES = 32 * 1024
"""Received bytes are parsed in pieces, since h11 measures a head only once it has parsed what it was given."""
LINGER_S = 2.0
"""Time for a client to take a refusal before its connection is ended."""
_FRAMING = re.compile(rb"^(?:content-length|transfer-encoding)[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_FOLDED = re.compile(rb"\n[ \t]")


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    head_timeout_s: float
    """From the connection, or the first byte of a further request, to the end of its head."""
    body_timeout_s: float
    """To receive a body, read by the service or dropped; and for a client to take a reply."""
    max_body_bytes: int
    """Bytes of a body, its framing included, after which a connection is ended."""


def protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol of a service, as `uvicorn.Config(http=)` takes it."""
    return type("Connection", (_Connection,), {"limits": limits})


class _StrictFraming(h11.Connection):
    """Refuses requests whose end another server on the way may see elsewhere, which h11 allows."""

    reason = ""
    """Why the last request was refused."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        given = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                head = given[: len(given) - len(self.trailing_data[0])]
                _check_framing(head, is_old=event.http_version < b"1.1")
        except h11.RemoteProtocolError as error:
            self.reason = str(error)[:200]
            raise
        return event


def _check_framing(head: bytes, *, is_old: bool) -> None:
    values = _FRAMING.findall(head)
    if len(values) > 1 or b"," in b"".join(values):
        raise h11.RemoteProtocolError("got several Content-Length or Transfer-Encoding, expected one of either")
    if is_old and any(not value.strip().isdigit() for value in values):
        raise h11.RemoteProtocolError("got Transfer-Encoding with HTTP/1.0, expected Content-Length")
    if _FOLDED.search(head):
        raise h11.RemoteProtocolError("got a header of several lines, expected one line each")


class _Connection(H11Protocol):
    limits: ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn: h11.Connection = _StrictFraming(h11.SERVER, HEAD_BYTES)
        self.since = self.loop.time()
        """Start of the phase: of the head, the body, or the pause between two requests."""
        self._phase: object = None
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._reply_deadline: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            self._refuse("overloaded", "too many connections; try again later.")
            # Not one of those that are served, so that its end is not waited for.
            self.connections.discard(self)
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._received += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self._watch()
            if self.conn.their_state is h11.SEND_BODY and self._received > self.limits.max_body_bytes:
                self._drop()
                return

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            # Sent before this request had its reply. No client of ours does, and one connection could hold the work of
            # many, with heads that nothing has measured.
            self.transport.close()
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_deadline(self.limits.body_timeout_s)
            return
        if self.conn.their_state is h11.IDLE:
            # uvicorn's timer of idle connections runs.
            self._phase, self.since = None, self.loop.time()
            self._set_deadline(None)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # A reply that was not taken by now is not waited for.
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reply_deadline = self.loop.call_later(self.limits.body_timeout_s, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reply_deadline is not None:
            self._reply_deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = cast(_StrictFraming, self.conn).reason
            self._refuse("bad_request", f"not a valid HTTP request: {reason}.")
        else:
            # A request that has its reply: the rest of its body is malformed.
            self._close()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress: one that has not arrived, or the rest of one that has its reply."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> bool:
        """End the connection that has gone longest without a request; False where all have one."""
        others = cast("Iterator[_Connection]", (other for other in self.connections if other is not self))
        longest = min((other for other in others if other.is_waiting), key=lambda other: other.since, default=None)
        if longest is not None:
            longest._drop()
        return longest is not None

    def _watch(self) -> None:
        """Set the deadline of a phase that has begun. It is not moved by what arrives within the phase."""
        phase = (self.conn.their_state, self.cycle)
        if phase == self._phase:
            return
        self._phase, self.since, self._received = phase, self.loop.time(), 0
        if self.conn.their_state is h11.IDLE:
            self._set_deadline(self.limits.head_timeout_s)
        elif self.conn.their_state is h11.SEND_BODY:
            # The service itself refuses a body that takes too long, before.
            self._set_deadline(self.limits.body_timeout_s + LINGER_S)
        else:
            self._set_deadline(None)

    def _set_deadline(self, after_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if after_s is None else self.loop.call_later(after_s, self._too_late)

    def _too_late(self) -> None:
        states = (self.conn.their_state, self.conn.our_state)
        if states == (h11.IDLE, h11.IDLE) and not self.transport.is_closing():
            text = f"the head of a request did not arrive within {self.limits.head_timeout_s:g} s."
            self._refuse("head_timeout", text)
        else:
            self._drop()

    def _refuse(self, code: str, message: str) -> None:
        """Reply without the application, and end the connection."""
        status = HTTPStatus(STATUS[code])
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        head += "Retry-After: 1\r\n\r\n" if code == "overloaded" else "\r\n"
        self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        """End the connection once what was written has been taken, and soon."""
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()
