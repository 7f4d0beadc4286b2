"""The saves of a run at its step boundaries, and with `run.save_async` beside the steps that follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from unirl.core.data.run_data import RunData
from unirl.core.observe.events import EventStream
from unirl.core.specs.plan import Plan

from .checkpoints import Checkpoints
from .parts import Parts, attributed
from .resume import checkpoint_state

__all__ = ["Saves"]

Write = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """A complete checkpoint."""

    step: int
    folder: Path
    size_bytes: int
    seconds: float
    """From the boundary until it was complete."""


class Saves:
    """Saves a run, with at most one save in flight. As a context, waits for that one at the end.

    Used by one thread, which reports: the event of a checkpoint follows its completion, at the next call.
    """

    def __init__(
        self, plan: Plan, checkpoints: Checkpoints, *, data: RunData, parts: Parts, events: EventStream
    ) -> None:
        self._plan, self._checkpoints, self._data, self._parts, self._events = plan, checkpoints, data, parts, events
        self._pending: futures.Future[_Saved] | None = None
        self._staged_s = 0.0
        """Seconds that the run waited for the copies of the one in flight."""

    def save(self, step: int) -> None:
        """Save this step boundary, after the save in flight.

        With `run.save_async` it returns with a copy of everything that is saved, if the backends make one. Raises
        whatever `Checkpoints.save` raises for either of the two.
        """
        self._events.check()
        self.wait()
        began = time.perf_counter()
        state = checkpoint_state(self._plan, data=self._data, algorithms=self._parts.algorithms)
        backends = self._parts.backends
        snapshots = self._snapshots(step)
        writers: dict[str, Write] = snapshots or {name: backend.save for name, backend in backends.items()}

        def write(folder: Path) -> None:
            for name, write_backend in writers.items():
                (folder / name).mkdir(exist_ok=True)
                write_backend(folder / name)

        def saved() -> _Saved:
            path = self._checkpoints.save(step, write=write, state=state)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            return _Saved(step=step, folder=path, size_bytes=size, seconds=time.perf_counter() - began)

        if snapshots:
            self._pending = _started(saved)
            self._staged_s = time.perf_counter() - began
        else:
            result = saved()
            self._report(result, stalled_s=result.seconds)

    def check(self) -> None:
        """Report the save in flight if it is complete. Raises its error if it failed."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, and report it. Raises its error if it failed."""
        if self._pending is None:
            return
        began = time.perf_counter()
        futures.wait([self._pending])
        pending, self._pending = self._pending, None
        saved = pending.result()
        # Waking up takes a moment after it was complete.
        self._report(saved, stalled_s=min(saved.seconds, self._staged_s + time.perf_counter() - began))

    def _snapshots(self, step: int) -> dict[str, Write]:
        """The writers of copies that every backend has made; empty, with a finding, if one of them makes none."""
        snapshots: dict[str, Write] = {}
        if not self._plan.run.save_async:
            return {}
        for name, backend in self._parts.backends.items():
            which = f"backend of model {name!r}" if name else "backend"
            with attributed(which, phase="checkpoint"):
                snapshot = backend.snapshot()
            if snapshot is None:
                text = f"run.save_async: the {which} makes no snapshots, so the run waits for each save"
                self._events.finding(text, step=step, once="save_async")
                return {}
            snapshots[name] = snapshot
        return snapshots

    def _report(self, saved: _Saved, *, stalled_s: float) -> None:
        self._events.emit(
            "checkpoint_saved",
            step=saved.step,
            folder=saved.folder.name,
            size_bytes=saved.size_bytes,
            seconds=saved.seconds,
            stalled_s=stalled_s,
        )

    def __enter__(self) -> Saves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note("\n".join([str(failure), *getattr(failure, "__notes__", ())]))


def _started(work: Callable[[], _Saved]) -> futures.Future[_Saved]:
    """The result of work that a thread does. A process that has to end does not wait for it."""
    result: futures.Future[_Saved] = futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            result.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return result
