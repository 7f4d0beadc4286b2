"""The samples of the step that lie with rollout workers, and how those of a worker that is gone are made again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unirl.core.errors import RunFailed
from unirl.core.rollout import Rollout

from .actors import Actor, Call, WorkerDied
from .cluster import Cluster, Restart
from .remote_rows import renamed, renames
from .weight_sync import WeightSync

__all__ = ["Samples"]

T = TypeVar("T")

Named = Callable[[Any], Any]
"""Gives the rows in a batch, or in a tuple of tensors, the names that they have now."""


class Samples:
    """Remembers what was asked of each rollout worker for the rollout at hand.

    A sample is a function of the seed, its prompt and the weights that made it. As long as those weights train, a new
    process makes the samples of one that died again; calls that need them are then repeated. Several threads may.
    """

    def __init__(self, cluster: Cluster, weights: WeightSync | None, *, retries: int) -> None:
        """weights: None where samples lie with the ranks that train, and a death ends the run.

        retries: of each call that needs samples.
        """
        self._cluster, self._weights, self._retries = cluster, weights, retries
        self._rollout = -1
        self._made: list[tuple[Call, Rollout]] = []
        self._names: dict[Any, Any] = {}
        """What a tensor was called when it was made -> what it is called now."""
        self._lock = threading.RLock()

    def begin(self, rollout: int) -> None:
        """A rollout of this number is made from now on, in one or more pieces; no other is made again any more."""
        with self._lock:
            if rollout != self._rollout:
                self._rollout, self._made = rollout, []

    def note(self, calls: Sequence[Call], answers: Sequence[Rollout]) -> None:
        """These calls of `generate` gave these answers."""
        with self._lock:
            self._made += zip(calls, answers, strict=True)

    @property
    def restart(self) -> Restart | None:
        """What a new process needs that replaces a rollout worker; None where one that dies ends the run."""
        return self._restored if self._weights is not None else None

    def needed(self, call: Callable[[Named], T]) -> T:
        """What a call gives that needs samples; repeated when they had to be made again.

        call: gets the function that names the rows of what it sends.
        Raises WorkerDied when a worker is gone and its samples with it.
        """
        left = self._retries
        while True:
            handles = {actor.name: actor.handle for actor in self._workers()}
            try:
                return call(lambda value: renamed(value, self._names))
            except WorkerDied as died:
                lost = next((actor for actor in self._workers() if actor.name == died.worker), None)
                if lost is None or not left or self._weights is None or not self._weights.are_current:
                    raise
                left -= 1
                with self._lock:
                    if lost.handle is handles[lost.name]:
                        self._cluster.replace(lost, lost.handle, died)
                        self._restored(lost)

    def _workers(self) -> list[Actor]:
        return list({call.actor.name: call.actor for call, _ in self._made}.values())

    def _restored(self, actor: Actor) -> None:
        """Bring the weights of the rollout to a new process, and have it make its samples so far again."""
        assert self._weights is not None
        self._weights.refresh(actor)
        for call, before in self._made:
            if call.actor is actor:
                (after,) = self._cluster.run([call], phase="generate")
                for name, track in before.tracks.items():
                    found = renames(track, after.tracks[name])
                    if found is None:
                        raise RunFailed(
                            f"launcher: {actor} made samples again that were gone, and they are not the same: its "
                            "machine computes otherwise. Resume the run."
                        )
                    self._names |= found
