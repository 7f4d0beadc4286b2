"""Time-sharing of devices between training and rollouts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .actors import Actor
from .cluster import Cluster

__all__ = ["Turns"]


class Turns:
    """Offloads one role before onloading the other on a shared device; does nothing when no device is shared.

    The switch happens on the first call that needs it, so consecutive calls of one role cost nothing.
    """

    def __init__(self, cluster: Cluster, *, train: Sequence[Actor], rollout: Sequence[Actor], is_shared: bool) -> None:
        """Training has the devices first; rollout workers start asleep."""
        self._cluster, self._train, self._rollout, self._is_shared = cluster, train, rollout, is_shared
        self._is_trains = True
        self._lock = threading.Lock()

    def rollout(self) -> None:
        """Give the devices to the rollout workers."""
        self._change(to_train=False)

    def train(self) -> None:
        """Give the devices to the train ranks."""
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
