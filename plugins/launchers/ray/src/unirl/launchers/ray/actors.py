"""The driver's handles for workers, the calls it makes, and how their failures are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.core.errors import ProcessLost, RunFailed, UniRLError

from .placement import WorkerPlace
from .ray_worker import WorkerGone
from .worker import WorkerFacts

__all__ = ["Actor", "Call", "WorkerDied", "explained", "has_died"]


@dataclass(kw_only=True, eq=False)
class Actor:
    """A worker. Its process may be replaced by another one."""

    place: WorkerPlace
    handle: Any = None
    facts: WorkerFacts = field(default_factory=lambda: WorkerFacts(host="not started", pid=0, device=""))
    setup: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = field(
        default_factory=lambda: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]]()
    )
    """Set-up calls (method and arguments), repeated on a replacement process."""

    @property
    def name(self) -> str:
        return self.place.name

    def __str__(self) -> str:
        return f"worker {self.name!r} (host {self.facts.host}, process {self.facts.pid})"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A method of a `Worker` and its arguments."""

    actor: Actor
    method: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    is_background: bool = False
    """Whether it runs beside the worker's other calls, in a thread of its own."""


class WorkerDied(ProcessLost):
    """A worker's process is gone."""

    def __init__(self, text: str, *, worker: str) -> None:
        super().__init__(text)
        self.worker = worker


def has_died(error: Exception) -> bool:
    """Whether the process behind a call is dead; not when the call raised."""
    from ray import exceptions

    return isinstance(error, exceptions.RayActorError) and not isinstance(error, exceptions.RayTaskError)


def explained(error: Exception, actor: Actor, phase: str, *, others: Sequence[Actor]) -> UniRLError:
    """The error to raise. User-facing errors of a worker are kept, with a note naming the worker."""
    from ray import exceptions

    where = f"{actor} in phase {phase!r}"
    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerGone):
            gone = next((str(other) for other in others if other.name == cause.worker), f"worker {cause.worker!r}")
            return WorkerDied(f"launcher: {gone} died; {where} needs it.", worker=cause.worker)
        if isinstance(cause, UniRLError):
            cause.add_note(f"Raised by {where}.")
            return cause
        if isinstance(cause, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
            return _no_room(cause, where)
        return RunFailed(f"launcher: {where} failed: {type(cause).__name__}: {cause}", phase=phase)
    if isinstance(error, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
        return _no_room(error, where)
    if isinstance(error, exceptions.RayActorError):
        return WorkerDied(f"launcher: {actor} died in phase {phase!r}: {_reason(error)}", worker=actor.name)
    return RunFailed(f"launcher: {where}: {type(error).__name__}: {error}")


def _no_room(error: Exception, where: str) -> RunFailed:
    from ray.exceptions import OutOfDiskError

    disk = ", and so is the disk it spills to" if isinstance(error, OutOfDiskError) else ""
    return RunFailed(
        f"launcher: {where}: Ray's object store is full{disk}. Raise launcher.object_store_mb, or "
        "`ray start --object-store-memory` in your own cluster, or stop other jobs that fill it."
    )


def _reason(error: Exception) -> str:
    """The lines of Ray's message that explain why the actor died."""
    lines = [line.strip() for line in str(error).splitlines()]
    skipped = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:", "The actor is dead because its worker")
    return " ".join(line for line in lines if line and not line.startswith(skipped)) or type(error).__name__
