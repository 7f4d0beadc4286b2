"""The samples of a step held by rollout workers, and how to regenerate those of a dead worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from unirl.core.errors import RunFailed
from unirl.core.types.track import Track
from unirl.transfer.remote_rows import renamed, renames

from .actors import Actor, Call, WorkerDied
from .cluster import Cluster, Restart
from .weight_sync import WeightSync

__all__ = ["Samples"]

T = TypeVar("T")

Named = Callable[[Any], Any]
"""Updates the remote handles in a batch, or in a tuple of tensors, to their current values."""


class Samples:
    """Records the calls made to each rollout worker for the current rollout.

    A sample is a function of the seed, its prompt and the weights. While the train ranks still have those weights, a
    replacement process can regenerate the samples of a dead one; calls that need them are then repeated. Thread-safe.
    """

    def __init__(self, cluster: Cluster, weights: WeightSync | None, *, retries: int) -> None:
        """weights: None when the train ranks hold the samples; a dead rank then fails the run.

        retries: per call that needs samples.
        """
        self._cluster, self._weights, self._retries = cluster, weights, retries
        self._rollout = -1
        self._made: list[tuple[Call, Track]] = []
        self._names: dict[Any, Any] = {}
        """Original handle of a tensor -> its current handle."""
        self._lock = threading.RLock()

    def begin(self, rollout: int) -> None:
        """Start recording this rollout, made in one or more calls; earlier ones can no longer be regenerated."""
        with self._lock:
            if rollout != self._rollout:
                self._rollout, self._made = rollout, []

    def note(self, calls: Sequence[Call], answers: Sequence[Track]) -> None:
        """Record calls of `generate` and their answers."""
        with self._lock:
            self._made += zip(calls, answers, strict=True)

    @property
    def restart(self) -> Restart | None:
        """Restores the state of a replacement rollout worker; None when a dead worker fails the run."""
        return self._restarted if self._weights is not None else None

    def needed(self, call: Callable[[Named], T], *, stages: Collection[str] = ()) -> T:
        """The result of a call that needs samples; repeated if they had to be regenerated.

        call: receives the function that updates the handles of its arguments.  stages: whose samples; empty is all.
        Raises WorkerDied when a worker and its samples are lost.
        """
        left = self._retries
        while True:
            handles = {actor.name: actor.handle for actor in self._workers()}
            try:
                return call(lambda value: renamed(value, self._names))
            except WorkerDied as died:
                lost = next((actor for actor in self._workers() if actor.name == died.worker), None)
                if lost is None or not left or not self._can_restore(stages):
                    raise
                left -= 1
                with self._lock:
                    if lost.handle is handles[lost.name]:
                        self._cluster.replace(lost, lost.handle, died)
                        self._restored(lost)

    def _workers(self) -> list[Actor]:
        return list({call.actor.name: call.actor for call, _ in self._made}.values())

    def _can_restore(self, stages: Collection[str]) -> bool:
        weights, made = self._weights, {before.name for _, before in self._made}
        return weights is not None and all(weights.is_current(stage) for stage in stages or made)

    def _restarted(self, actor: Actor) -> None:
        """For a new process that is to generate: every stage may follow."""
        assert self._weights is not None
        self._weights.check_current(actor)
        self._restored(actor)

    def _restored(self, actor: Actor) -> None:
        """Send the rollout's weights to a new process, and have it regenerate its samples.

        Not those of a stage whose model has trained since: they are no longer needed.
        """
        assert self._weights is not None
        self._weights.refresh(actor)
        for call, before in self._made:
            if call.actor is actor and self._weights.is_current(before.name):
                (after,) = self._cluster.run([call], phase="generate")
                result = renames(before, after)
                if result is None:
                    raise RunFailed(
                        f"launcher: {actor} regenerated lost samples, but they differ from the originals: its "
                        "machine has different numerics. Resume the run."
                    )
                self._names |= result
