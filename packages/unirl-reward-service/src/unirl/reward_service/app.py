"""The HTTP interface of a service."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from unirl.reward_service.wire import ScoreRequest, read_request
from unirl.reward_service.wire_pixels import WireError

from .config import ServiceConfig
from .errors import ServiceError
from .logs import fields
from .metrics import Metrics
from .replies import Replies
from .scorer_process import ScorerProcess, scorer_environment

__all__ = ["Service", "make_app"]

log = logging.getLogger(__name__)

MSGPACK = "application/msgpack"


class Service:
    """The scorers, and what requests share."""

    def __init__(self, config: ServiceConfig, *, keys: Sequence[str]) -> None:
        """keys: API keys; none asks for none."""
        self.config = config
        self.metrics = Metrics()
        self.replies = Replies(keep_s=config.keep_replies_s, max_bytes=int(config.keep_replies_mb * 1e6))
        self.is_draining = False
        self.pending_bytes = 0
        """Bytes of bodies that are held: those that have arrived, not those that a client announces."""
        self._keys = [_digest(key) for key in keys]
        self.scorers: Mapping[str, ScorerProcess] = {
            name: ScorerProcess(
                name,
                scorer,
                environment=scorer_environment(without=config.keys_env),
                timeout_s=config.request_timeout_s,
                max_batch_bytes=self.max_body_bytes,
                metrics=self.metrics,
            )
            for name, scorer in config.scorers.items()
        }

    async def start(self) -> None:
        """Start all scorers at once. Raises RunFailed when one cannot be built, and leaves none behind."""
        results = await asyncio.gather(*(s.start() for s in self.scorers.values()), return_exceptions=True)
        if errors := [result for result in results if result is not None]:
            await self.close()
            raise errors[0]

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self.scorers.values()))

    @property
    def max_body_bytes(self) -> int:
        return int(self.config.max_body_mb * 1e6)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and all(scorer.is_up for scorer in self.scorers.values())

    @property
    def hosts(self) -> list[str]:
        """Values of the header Host that are accepted. Without keys, a web page could otherwise reach the service
        through a name that it lets resolve to a loopback address."""
        config = self.config
        if self._keys and not config.hosts:
            return ["*"]
        own = f"[{config.host}]" if ":" in config.host else config.host
        return ["localhost", "127.0.0.1", "[::1]", own, *config.hosts]

    def check_key(self, request: Request) -> None:
        """Raises ServiceError for a request without one of the keys. Takes as long for every wrong key."""
        if not self._keys:
            if "origin" in request.headers:
                raise ServiceError("forbidden", "the request comes from a web page, and the service has no API keys.")
            return
        given = _digest(request.headers.get("authorization", "").removeprefix("Bearer "))
        # All of them, so that the time does not tell which one is near.
        if not any([hmac.compare_digest(given, key) for key in self._keys]):
            raise ServiceError("unauthorized", "the API key is missing or wrong: `Authorization: Bearer KEY`.")

    async def score(self, request: Request) -> Response:
        """Scores of the samples in the body, as msgpack."""
        began, received, num_bytes = time.monotonic(), bytearray(), 0
        label, code, request_id, count = "", "internal", "", 0
        size = self._admitted(request)
        try:
            try:
                await self._receive(request, size, into=received)
            finally:
                num_bytes = len(received)
            parsed, body, content = await asyncio.to_thread(self._read, received)
            request_id, count = parsed.id, len(parsed.samples.sample_ids)
            scorer = self._scorer(parsed.scorer)
            label = scorer.name
            reply, is_repeated = self.replies.get(request_id, content, partial(scorer.submit, parsed, body))
            # The scorer has what it needs of them, which is less.
            del parsed, body
            if is_repeated:
                self.metrics.repeated.labels(label).inc()
            # A client that goes away does not cancel it: the reply is kept for its next attempt.
            scores = await asyncio.shield(reply)
            code = "ok"
            return Response(scores, media_type=MSGPACK)
        except WireError as error:
            code = error.code
            raise ServiceError(error.code, str(error)) from error
        except ServiceError as error:
            code = error.code
            raise
        except ClientDisconnect:
            code = "client_gone"
            # The client is gone, so this is not read.
            return Response(status_code=400)
        finally:
            self.pending_bytes -= num_bytes
            self.metrics.pending.set(self.pending_bytes)
            self.metrics.requests.labels(label, code).inc()
            seconds = time.monotonic() - began
            if label:
                self.metrics.seconds.labels(label).observe(seconds)
            log.info(
                "request",
                extra=fields(
                    id=request_id,
                    scorer=label,
                    code=code,
                    samples=count,
                    body_bytes=num_bytes,
                    ms=round(seconds * 1000, 2),
                    client=request.client.host if request.client else "",
                ),
            )

    def described(self, name: str) -> dict[str, object]:
        scorer = self._scorer(name)
        info = {} if scorer.info is None else structs.asdict(scorer.info)
        limits = {"max_samples": self.config.max_samples, "max_body_bytes": self.max_body_bytes}
        return {"name": name, "is_up": scorer.is_up, **limits, **info}

    def _scorer(self, name: str) -> ScorerProcess:
        if name not in self.scorers:
            known = ", ".join(sorted(self.scorers))
            raise ServiceError("not_found", f"scorer: got {name[:80]!r}, expected one of {known}.")
        return self.scorers[name]

    def _admitted(self, request: Request) -> int:
        """Size of the body of a request that may be read. Raises ServiceError for one that may not."""
        if self.is_draining:
            raise ServiceError("draining", "the service is shutting down.", retry_after_s=1)
        given = request.headers.get("content-length", "")
        if not given.isdecimal():
            raise ServiceError("length_required", "Content-Length is missing.")
        size, most = int(given), self.max_body_bytes
        if size > most:
            raise ServiceError("too_large", f"the body has {size} bytes, expected at most {most}; send fewer samples.")
        self._check_room(size)
        return size

    def _check_room(self, size: int) -> None:
        if self.pending_bytes + size > self.config.max_pending_mb * 1e6:
            raise ServiceError("overloaded", "too many bodies are held; try again later.", retry_after_s=0.5)

    async def _receive(self, request: Request, size: int, *, into: bytearray) -> None:
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                async for piece in request.stream():
                    self._check_room(len(piece))
                    self.pending_bytes += len(piece)
                    into += piece
                    if len(into) > size:
                        raise ServiceError("bad_request", f"the body has more than the {size} bytes that it states.")
        except TimeoutError:
            text = f"the body did not arrive within {self.config.body_timeout_s:g} s."
            raise ServiceError("body_timeout", text) from None

    def _read(self, received: bytearray) -> tuple[ScoreRequest, bytes, bytes]:
        """The request, its bytes and their hash. For a thread: a large body takes longer than others should wait."""
        body = bytes(received)
        received.clear()
        return read_request(body, limits=self.config.wire_limits), body, hashlib.sha256(body).digest()


def make_app(service: Service) -> FastAPI:
    """The interface of a service, which starts and ends with it. No page describes it to strangers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()

    async def _check_key(request: Request) -> None:
        service.check_key(request)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=service.hosts, www_redirect=False)
    keyed = [Depends(_check_key)]

    @app.get("/health")
    async def _health() -> dict[str, bool]:
        return {"healthy": True}

    @app.get("/ready")
    async def _ready() -> JSONResponse:
        return JSONResponse({"ready": service.is_ready}, status_code=200 if service.is_ready else 503)

    @app.get("/metrics", dependencies=keyed)
    async def _metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/scorers", dependencies=keyed)
    async def _scorers() -> dict[str, object]:
        return {"scorers": [service.described(name) for name in service.scorers]}

    @app.get("/v1/scorers/{name}", dependencies=keyed)
    async def _scorer(name: str) -> dict[str, object]:
        return service.described(name)

    @app.post("/v1/score", dependencies=keyed)
    async def _score(request: Request) -> Response:
        return await service.score(request)

    @app.exception_handler(ServiceError)
    async def _refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        # A body that was not read is left to uvicorn, which receives and drops it: the reply would be lost otherwise.
        headers = {} if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
        return _error(error.code, str(error), status=error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def _not_found(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _error(
            "not_found" if error.status_code == 404 else "bad_request", error.detail, status=error.status_code
        )

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> JSONResponse:
        # Its traceback is in the log.
        return _error("internal", "the service failed; its log says why.", status=500)

    return app


def _error(code: str, message: str, *, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)


def _digest(text: str) -> bytes:
    """Digest with one length for every text, as a comparison in constant time needs."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
