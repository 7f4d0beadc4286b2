"""Who has the devices, when training and rollouts share them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .actors import Actor
from .cluster import Cluster

__all__ = ["Turns"]


class Turns:
    """Frees a device of those who had it before those whose turn it is take it back; nothing when they share none.

    A turn is changed by the first call that needs another one, so that those who have it keep it.
    """

    def __init__(self, cluster: Cluster, *, train: Sequence[Actor], rollout: Sequence[Actor], is_shared: bool) -> None:
        """At first it is the trainers' turn, and rollout workers sleep."""
        self._cluster, self._train, self._rollout, self._is_shared = cluster, train, rollout, is_shared
        self._is_trains = True
        self._lock = threading.Lock()

    def rollout(self) -> None:
        """The rollout workers' turn."""
        self._change(to_train=False)

    def train(self) -> None:
        """The train ranks' turn."""
        self._change(to_train=True)

    def _change(self, *, to_train: bool) -> None:
        if not self._is_shared:
            return
        with self._lock:
            if self._is_trains == to_train:
                return
            if to_train:
                self._cluster.call(self._rollout, "sleep", phase="sleep")
                self._cluster.call(self._train, "onload", phase="onload")
            else:
                self._cluster.call(self._train, "offload", phase="offload")
                self._cluster.call(self._rollout, "wake", phase="wake")
            self._is_trains = to_train
