"""A worker as a Ray actor, and Ray's settings."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from unirl.core.errors import RunFailed
from unirl.core.specs.plan import Plan
from unirl.transfer.wire import packed, unpacked

from .machine_code import load_files
from .worker import Worker, WorkerFacts

__all__ = ["CAUSE_WITHIN_S", "SETTINGS", "RayWorker", "WorkerGone", "actor_class", "actor_name"]

SETTINGS = {
    # Under `uv run`, Ray would rebuild the environment on every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    # A call abandoned because its worker hung may fail later, and Ray would print its error then.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The cluster hides GPUs from workers that request none; the check of a machine asks for none and looks at all.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

CAUSE_WITHIN_S = 5.0
"""When one worker fails, another may have died first, which Ray takes a moment to notice."""
INLINED_BYTES = 100 * 2**10
"""Arguments up to this size are part of a call; Ray puts larger ones into its object store, for each call."""


class WorkerGone(RunFailed):
    """A worker called another worker that is dead."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker


class RayWorker:
    """A `Worker` as an actor. One call runs at a time, and one background call; tensor reads and health checks wait for
    neither."""

    def __init__(self, run: str, name: str) -> None:
        self._run, self._name = run, name
        self._worker: Worker | None = None

    def open(self, plan: bytes, address: Any, plugin_files: Sequence[Path] = (), *, has_gpu: bool) -> WorkerFacts:
        """Create the worker. Separate from process start, so that errors surface as those of a call.

        plugin_files: single-file plugins used by the plan, which holds objects of their classes.  has_gpu: whether it
        was given one.
        """
        import ray

        load_files(plugin_files, machine=socket.gethostname())
        opened: Plan = unpacked(plan)
        node = ray.get_runtime_context().get_node_id()
        self._worker = Worker(
            self._name,
            opened,
            run=self._run,
            ask=self._ask,
            tell=self._tell,
            machine=f"{socket.gethostname()!r} (node {node[:8]})",
            host=ray.util.get_node_ip_address(),
            address=address,
            has_gpu=has_gpu,
        )
        return self._worker.facts()

    def call(self, method: str, data: bytes) -> bytes:
        """method: of the `Worker`, or of a part of it, such as `weights.ship`.  data: packed positional and keyword
        arguments. Returns the packed answer."""
        args, named = unpacked(data)
        return packed(attrgetter(method)(self._opened)(*args, **named))

    def background(self, method: str, data: bytes) -> bytes:
        """`call` in a thread beside the one of `call`."""
        return self.call(method, data)

    def aside(self, method: str) -> Any:
        """A call without arguments that does not wait for the running one: it aborts it, or checks health."""
        return attrgetter(method)(self._opened)()

    def answer(self, question: Any) -> Any:
        return self._opened.answer(question)

    @property
    def _opened(self) -> Worker:
        assert self._worker is not None, f"worker {self._name!r} was not opened"
        return self._worker

    def _tell(self, workers: Sequence[str], method: str, data: bytes) -> list[bytes]:
        import ray

        sent = ray.put(data) if len(workers) > 1 and len(data) > INLINED_BYTES else data
        return self._get(workers, lambda other: other.call.remote(method, sent))

    def _ask(self, owner: str, question: Any) -> Any:
        (result,) = self._get([owner], lambda other: other.answer.remote(question))
        # Object-store buffers are read-only, and training makes views of them.
        return [tensor.clone() for tensor in result]

    def _get(self, workers: Sequence[str], ask: Callable[[Any], Any]) -> list[Any]:
        """Answers of other workers, called concurrently. Raises WorkerGone for a dead one rather than the errors it
        caused in others."""
        import ray
        from ray.exceptions import RayActorError

        asked: dict[Any, str] = {}
        result: dict[str, Any] = {}
        failure: Exception | None = None
        for worker in workers:
            try:
                asked[ask(ray.get_actor(actor_name(self._run, worker), namespace=self._run))] = worker
            except ValueError as error:
                # No actor has this name any longer.
                raise WorkerGone(worker) from error
        waiting = list(asked)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=None if failure is None else CAUSE_WITHIN_S)
            if not ready:
                break
            worker = asked[ready[0]]
            try:
                result[worker] = ray.get(ready[0])
            except RayActorError as error:
                raise WorkerGone(worker) from error
            except Exception as error:  # noqa: BLE001 - raised below, unless a death caused it
                failure = failure or error
        if failure is not None:
            raise failure
        return [result[worker] for worker in workers]


def actor_name(run: str, worker: str) -> str:
    return f"{run}/{worker}"


def actor_class() -> Any:
    """`RayWorker` decorated as a Ray actor class."""
    import ray

    read, beside = (ray.method(concurrency_group=group) for group in ("data", "background"))
    methods = {
        "answer": read(RayWorker.answer),
        "aside": read(RayWorker.aside),
        "background": beside(RayWorker.background),
    }
    decorate: Any = ray.remote  # its overloads lack concurrency groups
    return decorate(concurrency_groups={"data": 2, "background": 1})(type("RayWorker", (RayWorker,), methods))
