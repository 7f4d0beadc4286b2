"""Errors for clients: a code, a message and a status, and never a traceback."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.reward_service.wire import sendable

__all__ = ["STATUS", "ServiceError"]

STATUS: Mapping[str, int] = {
    "bad_request": 400,
    "bad_media": 422,
    "too_large": 413,
    "reward_failed": 422,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "body_timeout": 408,
    "head_timeout": 408,
    "id_reused": 409,
    "length_required": 411,
    "version_mismatch": 412,
    "overloaded": 429,
    "scorer_crashed": 500,
    "internal": 500,
    "draining": 503,
    "scorer_down": 503,
    "timeout": 504,
}
"""Code of an error -> HTTP status. A client may send the same request again after 429 and 503."""


class ServiceError(Exception):
    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(sendable(message))
        assert code in STATUS, code
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return STATUS[self.code]
