"""The replicas of a service: which one a request goes to, and what is done when one does not answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import httpx
import msgspec
from unirl.core.errors import RewardFailed
from unirl.reward_service.wire import sendable

if TYPE_CHECKING:
    from .config import RemoteConfig

__all__ = ["Replicas", "ScorerInfo", "described", "error_of"]

RETRIED = (429, 503)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pause before a replica that did not answer is tried again; twice as long each time."""


@dataclass(frozen=True, kw_only=True)
class ScorerInfo:
    """A scorer as its replicas describe it."""

    version: str
    media: str
    parts: tuple[str, ...]
    metadata: tuple[str, ...]
    scores_groups: bool
    max_samples: int
    max_body_bytes: int


@dataclass(kw_only=True)
class _Replica:
    url: str
    in_flight: int = 0
    num_sent: int = 0
    free_at: float = 0.0
    """Time of `time.monotonic` before which nothing is sent."""
    pause_s: float = FIRST_PAUSE_S
    last_error: str = ""


class Replicas:
    """For several threads."""

    def __init__(self, config: RemoteConfig) -> None:
        """Raises RewardFailed where the variable with the API key is not set."""
        headers: dict[str, str] = {}
        if config.key_env:
            key = os.environ.get(config.key_env, "")
            if not key:
                raise RewardFailed(f"reward.remote.key_env: {config.key_env} is not set on this machine.")
            headers["Authorization"] = f"Bearer {key}"
        self._config = config
        self._lock = threading.Lock()
        self._all = [_Replica(url=url.rstrip("/")) for url in config.urls]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        # Services are named by the recipe, and a proxy of the environment is not on the way to them.
        self._http = httpx.Client(headers=headers, timeout=config.timeout_s, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def describe(self, *, within_s: float) -> ScorerInfo:
        """The scorer as the replicas that answer describe it; each is asked at least once. Raises RewardFailed where
        none answers in this time, where the scorer is unknown, and where versions differ from each other or from
        the setting."""
        results = {replica.url: self._described(replica) for replica in self._all}
        until = time.monotonic() + within_s
        while not any(results.values()):
            if time.monotonic() >= until:
                raise self._none_answers(within_s)
            time.sleep(FIRST_PAUSE_S)
            results = {replica.url: self._described(replica) for replica in self._all}
        given = {url: info for url, info in results.items() if info is not None}
        versions = {info.version for info in given.values()}
        if len(versions) > 1:
            shown = ", ".join(f"{info.version[:16]} at {url}" for url, info in given.items())
            raise RewardFailed(
                f"reward.remote.urls: scorer {self._config.scorer!r} has several versions: {shown}. Give the replicas "
                "the same code, settings and weights."
            )
        info = next(iter(given.values()))
        if self._config.version not in ("", info.version):
            raise RewardFailed(
                f"reward.remote.version: scorer {self._config.scorer!r} is {info.version}, expected "
                f"{self._config.version}. Its code, settings or weights have changed."
            )
        return info

    def post(self, body: bytes) -> bytes:
        """The reply to a request, from whichever replica gives it. The bytes have an id, so that a replica that gets
        them twice scores them once.

        Raises RewardFailed for what another attempt cannot mend, and after `deadline_s` without a reply.
        """
        until = time.monotonic() + self._config.deadline_s
        last: _Replica | None = None
        while True:
            replica = self._next(last, until)
            try:
                reply = self._http.post(
                    f"{replica.url}/v1/score", content=body, headers={"Content-Type": "application/msgpack"}
                )
            except httpx.ReadTimeout:
                # It may be scoring: the next attempt there gets that reply.
                self._done(replica, error=f"no reply within timeout_s = {self._config.timeout_s:g}")
                last = replica
                continue
            except httpx.TransportError as error:
                self._done(replica, error=f"{type(error).__name__}: {error}")
                last = None
                continue
            if reply.status_code == 200:
                self._done(replica)
                return reply.content
            code, message = error_of(reply)
            if reply.status_code not in RETRIED:
                self._done(replica)
                raise RewardFailed(f"reward.remote: {replica.url} refused a request: {code}: {message}")
            self._done(replica, error=f"{code}: {message}", pause_s=_retry_after(reply))
            last = None

    def _next(self, last: _Replica | None, until: float) -> _Replica:
        """The replica with the fewest requests in flight, of those that may be tried now; waits for one."""
        while True:
            with self._lock:
                now = time.monotonic()
                if now > until:
                    raise self._none_answers(self._config.deadline_s)
                free = [replica for replica in self._all if replica.free_at <= now]
                if free:
                    replica = (
                        last if last in free else min(free, key=lambda replica: (replica.in_flight, replica.num_sent))
                    )
                    replica.in_flight += 1
                    replica.num_sent += 1
                    return replica
                wait_s = min(replica.free_at for replica in self._all) - now
            time.sleep(min(max(wait_s, 0.001), max(until - now, 0.001) + 0.001))

    def _done(self, replica: _Replica, *, error: str = "", pause_s: float | None = None) -> None:
        with self._lock:
            replica.in_flight -= 1
            if not error:
                replica.pause_s = FIRST_PAUSE_S
                return
            replica.last_error = error
            if pause_s is None:
                pause_s, replica.pause_s = replica.pause_s, min(LONGEST_PAUSE_S, 2 * replica.pause_s)
            replica.free_at = time.monotonic() + pause_s

    def _described(self, replica: _Replica) -> ScorerInfo | None:
        """None where it does not answer, or where the scorer is still starting."""
        try:
            reply = self._http.get(f"{replica.url}/v1/scorers/{quote(self._config.scorer, safe='')}")
        except httpx.TransportError as error:
            replica.last_error = f"{type(error).__name__}: {error}"
            return None
        if reply.status_code != 200:
            code, message = error_of(reply)
            if reply.status_code in RETRIED or reply.status_code >= 500:
                replica.last_error = f"{code}: {message}"
                return None
            raise RewardFailed(f"reward.remote.urls: {replica.url} refused a request: {code}: {message}")
        try:
            # Not as JSON alone: that has strings which neither a log nor a terminal can hold.
            content = msgspec.json.decode(reply.content, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            replica.last_error = f"{type(error).__name__}: {error}"
            return None
        if "version" not in content:
            replica.last_error = "the scorer is starting"
            return None
        try:
            return ScorerInfo(
                version=content["version"],
                media=content["media"],
                parts=tuple(content["parts"]),
                metadata=tuple(content["metadata"]),
                scores_groups=content["scores_groups"],
                max_samples=content["max_samples"],
                max_body_bytes=content["max_body_bytes"],
            )
        except (KeyError, TypeError) as error:
            raise RewardFailed(f"reward.remote.urls: {replica.url} is not a reward service: {error!r}.") from error

    def _none_answers(self, within_s: float) -> RewardFailed:
        shown = "; ".join(f"{replica.url}: {replica.last_error or 'no answer'}" for replica in self._all)
        limit = f" within deadline_s = {within_s:g}" if within_s else ""
        return RewardFailed(f"reward.remote.urls: no replica gave a reply{limit}: {shown}.")


def described(config: RemoteConfig) -> ScorerInfo:
    """The scorer as its replicas describe it, asked once. Raises as `Replicas.describe` does."""
    replicas = Replicas(config)
    try:
        return replicas.describe(within_s=0)
    finally:
        replicas.close()


def error_of(reply: httpx.Response) -> tuple[str, str]:
    """Code and message of a refusal, whoever sent it."""
    try:
        error = cast("Mapping[str, Any]", reply.json()["error"])
        return sendable(str(error["code"])), sendable(str(error["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return str(reply.status_code), reply.text[:200] or "no message"


def _retry_after(reply: httpx.Response) -> float:
    given = reply.headers.get("retry-after", "")
    return min(float(given), 30.0) if given.isdecimal() else FIRST_PAUSE_S
