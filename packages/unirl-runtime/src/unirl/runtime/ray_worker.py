"""A worker as a Ray actor, and the settings that Ray needs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from unirl.core.errors import RunFailed
from unirl.core.plan import Plan

from .wire import packed, unpacked
from .worker import Worker, WorkerFacts

__all__ = ["CAUSE_WITHIN_S", "SETTINGS", "RayWorker", "WorkerGone", "actor_class", "actor_name"]

SETTINGS = {
    # Ray would turn `uv run` into a rebuild of the environment on every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    # A call whose worker was given up for its hanging ends later, and Ray would print what it raised then.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A worker without GPUs must not be made blind for those of its machine that tests pretend to have.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

CAUSE_WITHIN_S = 5.0
"""When one of several workers fails, another one may have died first, which Ray takes a moment to see."""


class WorkerGone(RunFailed):
    """A worker asked another one, and that one is dead."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker


class RayWorker:
    """A `Worker` as an actor. One call runs at a time; reading its tensors and being looked at do not wait for it."""

    def __init__(self, run: str, name: str) -> None:
        self._run, self._name = run, name
        self._worker: Worker | None = None

    def open(self, plan: bytes, address: Any) -> WorkerFacts:
        """Become the worker. Apart from the start of the process, so that its errors are those of a call."""
        import ray

        opened: Plan = unpacked(plan)
        node = ray.get_runtime_context().get_node_id()
        self._worker = Worker(
            self._name,
            opened,
            run=self._run,
            ask=self._ask,
            tell=self._tell,
            machine=f"{socket.gethostname()!r} (node {node[:8]})",
            address=address,
        )
        return self._worker.facts()

    def call(self, method: str, data: bytes) -> bytes:
        """data: positional and named arguments, packed. Returns the answer, packed."""
        args, named = unpacked(data)
        return packed(getattr(self._opened, method)(*args, **named))

    def aside(self, method: str) -> Any:
        """A call without arguments that does not wait for the one that runs: one that ends it, or asks who is there."""
        return getattr(self._opened, method)()

    def answer(self, question: Any) -> Any:
        return self._opened.answer(question)

    @property
    def _opened(self) -> Worker:
        assert self._worker is not None, f"worker {self._name!r} was not opened"
        return self._worker

    def _tell(self, workers: Sequence[str], method: str, data: bytes) -> list[bytes]:
        return self._get(workers, lambda other: other.call.remote(method, data))

    def _ask(self, owner: str, question: Any) -> Any:
        (found,) = self._get([owner], lambda other: other.answer.remote(question))
        # What comes from the object store cannot be written to, and training makes views of it.
        return [tensor.clone() for tensor in found]

    def _get(self, workers: Sequence[str], ask: Callable[[Any], Any]) -> list[Any]:
        """The answers of other workers, asked at once. Raises WorkerGone for one that died, rather than what others
        raise because of that."""
        import ray
        from ray.exceptions import RayActorError

        asked: dict[Any, str] = {}
        found: dict[str, Any] = {}
        failure: Exception | None = None
        for worker in workers:
            try:
                asked[ask(ray.get_actor(actor_name(self._run, worker), namespace=self._run))] = worker
            except ValueError as error:
                # No actor has this name any more.
                raise WorkerGone(worker) from error
        waiting = list(asked)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=None if failure is None else CAUSE_WITHIN_S)
            if not ready:
                break
            worker = asked[ready[0]]
            try:
                found[worker] = ray.get(ready[0])
            except RayActorError as error:
                raise WorkerGone(worker) from error
            except Exception as error:  # noqa: BLE001 - raised below, unless a death is behind it
                failure = failure or error
        if failure is not None:
            raise failure
        return [found[worker] for worker in workers]


def actor_name(run: str, worker: str) -> str:
    return f"{run}/{worker}"


def actor_class() -> Any:
    """`RayWorker` as Ray wants it."""
    import ray

    read = ray.method(concurrency_group="data")
    cls = type("RayWorker", (RayWorker,), {"answer": read(RayWorker.answer), "aside": read(RayWorker.aside)})
    decorate: Any = ray.remote  # its overloads do not know concurrency groups
    return decorate(concurrency_groups={"data": 2})(cls)
