"""One scorer as the service holds it: a bounded queue, batches, and a process that is started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from unirl.core.errors import RunFailed
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, encode

from .config import ScorerConfig
from .errors import ServiceError
from .logs import fields
from .metrics import Metrics

__all__ = ["ScorerInfo", "ScorerProcess", "scorer_environment"]

log = logging.getLogger(__name__)

SIZE_BYTES = 8
MAX_ATTEMPTS = 2
"""Processes that may end during a request before it gets an error."""
LONGEST_PAUSE_S = 30.0
"""Longest pause between two starts."""


class ScorerInfo(msgspec.Struct, frozen=True):
    """A scorer as it is described to clients."""

    use: str
    version: str
    media: str
    scale: str
    parts: list[str]
    metadata: list[str]
    scores_groups: bool


@dataclass(kw_only=True, eq=False)
class _Waiting:
    id: str
    version: str
    """Version of the scorer that is expected; empty takes any."""
    sample_ids: list[str]
    body: bytes
    reply: asyncio.Future[bytes]
    attempts: int = 0
    """Processes that ended or timed out with it. From the first on it is sent as a separate batch."""
    since: float = field(default_factory=time.monotonic)

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def fail(self, error: ServiceError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class _Ended(Exception):
    """The process ended."""


class ScorerProcess:
    """For one event loop. `start` it, `submit` requests, `close` it."""

    def __init__(
        self,
        name: str,
        config: ScorerConfig,
        *,
        environment: Mapping[str, str],
        timeout_s: float,
        max_batch_bytes: int,
        metrics: Metrics,
    ) -> None:
        """environment: variables of its process.  timeout_s: longest time of a request, waiting included.
        max_batch_bytes: bodies that are joined; a larger one is one call."""
        self.name = name
        self.info: ScorerInfo | None = None
        """Description by the process that runs, or ran last; None before the first start."""
        self._config = config
        self._environment = environment
        self._timeout_s = timeout_s
        self._max_batch_bytes = max_batch_bytes
        self._metrics = metrics
        self._process: Process | None = None
        self._is_up = asyncio.Event()
        self._arrived = asyncio.Event()
        self._queue: deque[_Waiting] = deque()
        self._in_progress: list[_Waiting] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._why_down = "it is starting"
        self._is_starting = True

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    @property
    def pid(self) -> int:
        """Id of its process; 0 while there is none."""
        return self._process.pid if self._process is not None and self.is_up else 0

    async def start(self) -> None:
        """Start the process. Raises RunFailed when the reward cannot be built."""
        await self._launch()
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._serve())]

    async def close(self) -> None:
        """End the process; requests that wait get an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_up.clear()
        for waiting in (*self._in_progress, *self._queue):
            waiting.fail(ServiceError("draining", "the service is shutting down.", retry_after_s=1))
        if self._process is not None:
            await _end(self._process)

    def submit(self, request: ScoreRequest, body: bytes) -> asyncio.Future[bytes]:
        """The reply to come, as bytes or as a ServiceError. Raises ServiceError when the request is not admitted."""
        if not self.is_up and not self._is_starting:
            raise ServiceError("scorer_down", f"scorer {self.name!r} is down: {self._why_down}", retry_after_s=2)
        if len(self._queue) >= self._config.max_queue:
            raise ServiceError(
                "overloaded",
                f"scorer {self.name!r}: {len(self._queue)} requests wait; try again later.",
                retry_after_s=self._until_free_s(),
            )
        waiting = _Waiting(
            id=request.id,
            version=request.version,
            sample_ids=request.samples.sample_ids,
            body=body,
            reply=asyncio.get_running_loop().create_future(),
        )
        timer = asyncio.get_running_loop().call_later(
            self._timeout_s,
            waiting.fail,
            ServiceError("timeout", f"scorer {self.name!r} gave no scores within {self._timeout_s:g} s."),
        )
        waiting.reply.add_done_callback(lambda _: timer.cancel())
        self._queue.append(waiting)
        self._metrics.queue.labels(self.name).set(len(self._queue))
        self._arrived.set()
        return waiting.reply

    def _until_free_s(self) -> float:
        """About as long as the oldest request has waited, since the queue moves at that rate."""
        return min(10.0, max(0.1, time.monotonic() - self._queue[0].since))

    async def _serve(self) -> None:
        while True:
            batch = await self._next_batch()
            await self._is_up.wait()
            assert self.info is not None and self._process is not None
            batch = [waiting for waiting in batch if self._has_version(waiting)]
            if not batch:
                continue
            self._in_progress = batch
            try:
                replies = await asyncio.wait_for(self._exchange(self._process, batch), self._config.timeout_s)
            except TimeoutError:
                text = f"scorer {self.name!r} took longer than {self._config.timeout_s:g} s for the batch"
                self._try_again(batch, ServiceError("timeout", f"{text}; its process was ended."))
            except _Ended:
                text = f"the process of scorer {self.name!r} ended {MAX_ATTEMPTS} times while it scored this request."
                self._try_again(batch, ServiceError("scorer_crashed", text))
            else:
                for waiting, reply in zip(batch, replies, strict=True):
                    self._answer(waiting, reply)
            self._in_progress = []

    async def _next_batch(self) -> list[_Waiting]:
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        most = self._config.max_batch_size
        if self._config.max_wait_s and sum(waiting.num_samples for waiting in self._queue) < most:
            await asyncio.sleep(self._config.max_wait_s)
        batch: list[_Waiting] = []
        size = size_bytes = 0
        while self._queue:
            waiting = self._queue[0]
            is_alone = waiting.attempts > 0 or (bool(batch) and batch[0].attempts > 0)
            is_full = size + waiting.num_samples > most or size_bytes + len(waiting.body) > self._max_batch_bytes
            if batch and (is_alone or is_full):
                break
            self._queue.popleft()
            if not waiting.reply.done():
                batch.append(waiting)
                size += waiting.num_samples
                size_bytes += len(waiting.body)
        self._metrics.queue.labels(self.name).set(len(self._queue))
        return batch

    def _has_version(self, waiting: _Waiting) -> bool:
        """Whether the process is of the version that the request expects; else it gets an error."""
        assert self.info is not None
        expected = waiting.version
        if expected in ("", self.info.version):
            return True
        text = (
            f"version: scorer {self.name!r} is {self.info.version}, expected {expected}. Its code, settings or weights "
            "differ from those that the client began with."
        )
        waiting.fail(ServiceError("version_mismatch", text))
        return False

    async def _exchange(self, process: Process, batch: list[_Waiting]) -> list[dict[str, Any]]:
        """Send a batch and wait for its replies. Raises _Ended when the process ended."""
        assert process.stdin is not None
        self._metrics.batch.labels(self.name).observe(sum(waiting.num_samples for waiting in batch))
        try:
            process.stdin.write(len(batch).to_bytes(SIZE_BYTES, "big"))
            for waiting in batch:
                # One by one, since the rest of the service waits for what is copied here.
                process.stdin.write(len(waiting.body).to_bytes(SIZE_BYTES, "big"))
                process.stdin.write(waiting.body)
                await process.stdin.drain()
            return msgspec.msgpack.decode(await _read_frame(process), type=list[dict[str, Any]])
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise _Ended from error

    def _try_again(self, batch: list[_Waiting], error: ServiceError) -> None:
        """End what is left of the process, and put the requests before all others, each as a separate batch."""
        assert self._process is not None
        self._is_up.clear()
        self._is_starting = True
        with suppress(ProcessLookupError):
            self._process.kill()
        for waiting in reversed(batch):
            waiting.attempts += 1
            if waiting.attempts >= MAX_ATTEMPTS or (error.code == "timeout" and len(batch) == 1):
                waiting.fail(error)
            else:
                self._queue.appendleft(waiting)
                self._arrived.set()

    def _answer(self, waiting: _Waiting, reply: dict[str, Any]) -> None:
        assert self.info is not None
        if "error" in reply:
            code, message = reply["error"]
            waiting.fail(ServiceError(code, message))
            return
        if waiting.reply.done():
            return
        message = ScoreReply(
            format=FORMAT,
            id=waiting.id,
            scorer=self.name,
            version=self.info.version,
            sample_ids=waiting.sample_ids,
            values=reply["values"],
            parts=reply["parts"],
            scored=reply["scored"],
        )
        waiting.reply.set_result(encode(message))
        self._metrics.samples.labels(self.name).inc(waiting.num_samples)

    async def _keep_running(self) -> None:
        """Start the process again whenever it ends."""
        pause_s = 0.0
        while True:
            assert self._process is not None
            since = time.monotonic()
            code = await self._process.wait()
            self._is_up.clear()
            self._is_starting = True
            self._metrics.is_up.labels(self.name).set(0)
            self._metrics.restarts.labels(self.name).inc()
            log.error("scorer ended", extra=fields(scorer=self.name, pid=self._process.pid, exit_code=code))
            # One that keeps ending is not started in a tight loop.
            pause_s = 0.0 if time.monotonic() - since > LONGEST_PAUSE_S else _longer(pause_s)
            while not self.is_up:
                await asyncio.sleep(pause_s)
                try:
                    await self._launch()
                except RunFailed as error:
                    pause_s = _longer(pause_s)
                    self._not_started(error)

    def _not_started(self, error: RunFailed) -> None:
        """Nothing waits for a process that may never start: clients have other replicas."""
        self._is_starting = False
        self._why_down = str(error)
        log.error("scorer does not start", extra=fields(scorer=self.name, error=str(error)))
        down = ServiceError("scorer_down", f"scorer {self.name!r} is down: {error}", retry_after_s=2)
        while self._queue:
            self._queue.popleft().fail(down)

    async def _launch(self) -> None:
        config = self._config
        environment = dict(self._environment)
        if config.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
        start = {
            "use": config.use,
            "settings": config.settings,
            "device": config.device,
            "key": f"scorers.{self.name}.settings",
        }
        data = msgspec.msgpack.encode(start)
        began = time.monotonic()
        try:
            # -P: nothing is imported from the current folder.
            self._process = process = await asyncio.create_subprocess_exec(
                *(config.python or sys.executable, "-P", "-m", "unirl.reward_service.scorer"),
                stdin=PIPE,
                stdout=PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunFailed(f"scorers.{self.name}.python: {config.python or sys.executable}: {error}.") from error
        assert process.stdin is not None
        try:
            process.stdin.write(len(data).to_bytes(SIZE_BYTES, "big") + data)
            await process.stdin.drain()
            frame = await asyncio.wait_for(_read_frame(process), config.start_timeout_s)
        except TimeoutError:
            await _end(process)
            raise RunFailed(f"scorers.{self.name}: it did not start within {config.start_timeout_s:g} s.") from None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code = await process.wait()
            raise RunFailed(f"scorers.{self.name}: its process ended with exit code {code}; see the log.") from error
        except BaseException:
            await _end(process)
            raise
        message = msgspec.msgpack.decode(frame)
        if "failed" in message:
            await process.wait()
            raise RunFailed(str(message["failed"]))
        self.info = msgspec.convert(message["ready"], ScorerInfo)
        self._is_starting = False
        self._is_up.set()
        self._metrics.is_up.labels(self.name).set(1)
        log.info(
            "scorer is up",
            extra=fields(
                scorer=self.name,
                pid=process.pid,
                use=self.info.use,
                version=self.info.version,
                seconds=round(time.monotonic() - began, 3),
            ),
        )


def scorer_environment(*, without: str) -> dict[str, str]:
    """The variables of this process except the one with the API keys, which no reward needs."""
    return {name: value for name, value in os.environ.items() if name != without}


def _longer(pause_s: float) -> float:
    return min(LONGEST_PAUSE_S, max(0.1, 2 * pause_s))


async def _read_frame(process: Process) -> bytes:
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES), "big")
    return await process.stdout.readexactly(size)


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
