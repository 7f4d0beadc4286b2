"""Runs whose workers are killed or stopped at a chosen moment, and what is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from small_runs import events
from unirl.launchers.ray.actors import Call
from unirl.launchers.ray.cluster import Cluster
from unirl.loop.checkpoints import Checkpoints

METHOD = {
    "build": "build",
    "sync": "weights.ship",
    "generate": "generate",
    "score": "score",
    "fetch": "bring",
    "train": "train",
    "checkpoint": "save",
}
"""Phase -> the call of it that is on its way when the worker is struck."""

APART = ("launcher=ray", "launcher.placement=separate", "run.max_steps=2", "run.save_every=1")
"""One worker of each role, two steps, a checkpoint after each."""

HANG_S = 1.5
"""Each of these is waited for in full; what is not struck may take as long as it does on a busy machine."""


@dataclass
class Struck:
    """The worker that was struck, and the processes of all workers."""

    worker: str = ""
    pid: int = 0
    all_pids: set[int] = field(default_factory=set)


@contextmanager
def strike(role: str, phase: str, *, how: int = signal.SIGKILL, index: int = 0, stage: str = "") -> Iterator[Struck]:
    """Send a signal to a worker while a call of this phase is on its way, in the second step.

    stage: whose `generate` it is; empty is any.

    A build is struck as it comes, a checkpoint is that of the second step. For a worker that is stopped the driver
    waits `HANG_S`, for others as long as the run says.
    """
    struck, steps = Struck(), 0
    limit: float | None = None
    sent = Cluster._sent

    def sent_and_struck(cluster: Cluster, call: Call) -> Any:
        nonlocal steps, limit
        if limit is not None and call.method != METHOD[phase]:
            cluster._config.call_timeout_s, limit = limit, None
        steps += call.method == "end_rollout" and call.actor.name == "train-0"
        due = {"build": 0, "checkpoint": 2}.get(phase, 1)
        is_phase = call.method == METHOD[phase] and stage in ("", getattr(call.args[0], "track", ""))
        strikes = not struck.worker and is_phase and steps >= due
        if strikes:
            (victim,) = (a for a in cluster._actors if (a.place.role, a.place.index) == (role, index))
            struck.worker, struck.pid = victim.name, victim.facts.pid
            # It is stopped before the call leaves, or it might have answered a short one before it is struck.
            os.kill(struck.pid, signal.SIGSTOP)
        ref = sent(cluster, call)
        struck.all_pids |= {actor.facts.pid for actor in cluster._actors}
        if strikes:
            os.kill(struck.pid, how)
            if how == signal.SIGSTOP:
                limit, cluster._config.call_timeout_s = cluster._config.call_timeout_s, HANG_S
        return ref

    Cluster._sent = sent_and_struck
    try:
        yield struck
    finally:
        Cluster._sent = sent


@contextmanager
def full_object_store(*, at_sync: int) -> Iterator[list[int]]:
    """From this sync of weights on, nothing fits into Ray's object store: it is full of what is in use here.

    Gives the sizes of what fills it, in bytes, once it does.
    """
    held: list[Any] = []
    sizes: list[int] = []
    sent, syncs = Cluster._sent, 0

    def sent_when_full(cluster: Cluster, call: Call) -> Any:
        nonlocal syncs
        syncs += call.method == "weights.hold_export"
        size = 128 * 2**20
        while syncs == at_sync and size > 2**16:
            # Where there is no disk either, what is too large is refused, and half of it may fit.
            with suppress(ray.exceptions.OutOfDiskError):
                ref = ray.put(np.zeros(size, np.uint8))
                held.append((ref, ray.get(ref)))
                sizes.append(size)
            size //= 2
        syncs += syncs == at_sync
        return sent(cluster, call)

    Cluster._sent = sent_when_full
    try:
        yield sizes
    finally:
        Cluster._sent = sent


def still_alive(pids: set[int], *, within_s: float = 15.0) -> set[int]:
    """Those of these processes that do not end in time. A zombie has ended."""
    end = time.monotonic() + within_s
    while True:
        left = {pid for pid in pids if _is_alive(pid)}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def marked(mark: str) -> set[int]:
    """Processes that were started with this text in their environment."""
    result: set[int] = set()
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values():
                result.add(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return result


def wait_for(condition: Callable[[], bool], *, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"nothing came within {within_s:g} s"
        time.sleep(0.05)


def has_step(folder: Path, kind: str, step: int) -> bool:
    return (folder / "events.jsonl").exists() and any(event["step"] >= step for event in events(folder, kind))


def last_good_step(folder: Path) -> int:
    """The step of the newest checkpoint, after its checksums were compared. Raises CheckpointError for a broken one."""
    return Checkpoints(folder / "checkpoints").load().step


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
