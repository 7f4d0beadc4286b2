"""Weights from the train ranks to rollout workers that hold their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from unirl.core.capability import Cap, Support
from unirl.core.config import BackendConfig
from unirl.core.errors import EchoMismatch, RunFailed
from unirl.core.plan import Plan
from unirl.core.roles import Policy

from .actors import Actor, Call, WorkerDied
from .carrier_choice import carrier_between, sender_of
from .cluster import Cluster
from .config import RayConfig
from .turns import Turns
from .weight_ends import Shipped

if TYPE_CHECKING:
    from .remote_parts import RemoteBackend, RemoteEngine

__all__ = ["WeightSync"]

NOTHING = -1
"""The version of an engine whose weights are not those of any version that trained here."""


class WeightSync:
    """All ranks export together; rank 0 sends to the rollout workers, and both sides compare checksums.

    By the carrier `collective` all of them take the same buckets at once, in a group that is formed before the first
    transfer and again when other processes are to take part. By every other one they are sent to one after the other.
    """

    def __init__(
        self,
        plan: Plan,
        config: RayConfig,
        cluster: Cluster,
        *,
        train: Sequence[Actor],
        rollout: Sequence[Actor],
        turns: Turns,
    ) -> None:
        """Raises PlanRejected when the carrier that was asked for does not reach every rollout worker."""
        spec = plan.engine.spec
        is_shared = spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE
        trains = cast(BackendConfig, plan.backend.config).trains
        takes_lora = is_shared or spec.support(Cap.WEIGHTS_LORA) is Support.NATIVE
        self._kind: Literal["full", "lora", "merged"] = (
            "full" if trains == "full" else ("lora" if takes_lora else "merged")
        )
        self._cluster, self._train, self._rollout, self._turns = cluster, list(train), list(rollout), turns
        self._carrier = (carrier_between(config, train, rollout), config.carrier_dir)
        self._group: list[Any] = []
        """Handles of the processes that are in a group together, the sender first."""
        self._policy: Policy = "live"
        self._config = config
        self._bucket_bytes = config.bucket_mb * 2**20
        cluster.prepare(self._rollout, "open_receiver", carrier=self._carrier)
        if self._is_collective:
            # Now rather than with the first weights: machines that do not reach each other are an error of the start.
            self._meet([train[0], *rollout])

    def between(self, backend: RemoteBackend, engine: RemoteEngine) -> None:
        self._backend, self._engine = backend, engine
        backend.lend = self.lend
        # Rollout workers start from the checkpoint, and from adapters that a seed gave; the first sync settles both.
        engine.note_version(NOTHING)

    def sync(self) -> None:
        """Bring the weights that train to every rollout worker."""
        self._send(self._rollout)
        self._engine.note_version(self._backend.version)

    @property
    def are_current(self) -> bool:
        """Whether rollouts are made with the weights that train, and can be made with them again."""
        return self._engine.version == self._backend.version

    def refresh(self, actor: Actor) -> None:
        """Bring the weights of the rollout that is being made to one worker. Raises RunFailed when training went on."""
        version = self._engine.version
        if not self.are_current:
            raise RunFailed(
                f"launcher: {actor} is new and needs version {version} of the weights; version {self._backend.version} "
                "trains by now, and none is kept. Resume the run."
            )
        self._send([actor])

    @contextmanager
    def lend(self, which: Policy) -> Iterator[None]:
        """Inside the block the rollout workers hold the weights of another policy; then the next sync is due."""
        if which == "live":
            yield
            return
        self._policy = which
        try:
            self._send(self._rollout)
            yield
        finally:
            self._policy = "live"
            self._engine.note_version(NOTHING)

    def _send(self, receivers: Sequence[Actor]) -> None:
        cluster = self._cluster
        self._turns.train()
        cluster.call(self._train, "export_weights", policy=self._policy, kind=self._kind, phase="sync")
        self._turns.rollout()
        for together in [receivers] if self._is_collective else [[actor] for actor in receivers]:
            shipped = self._shipped(together)
            report = shipped.report
            if report.receipt.version != self._backend.version:
                raise EchoMismatch(
                    f"weights: version {self._backend.version} trains; {_names(together)} holds "
                    f"{report.receipt.version} after the sync."
                )
            size = report.size_bytes * len(together) + shipped.announced_bytes
            count = report.num_tensors * len(together)
            cluster.traffic.synced(size_bytes=size, tensors=count, seconds=report.seconds)
        cluster.call(self._train, "forget_export", phase="sync")

    @property
    def _is_collective(self) -> bool:
        return self._carrier[0] == "collective"

    def _shipped(self, receivers: Sequence[Actor]) -> Shipped:
        """Ship to workers, and again when one of them died and was replaced."""
        source = sender_of(receivers[0], self._carrier[0], self._train)
        named = {"carrier": self._carrier, "bucket_bytes": self._bucket_bytes}
        call = Call(actor=source, method="ship_weights", args=([actor.name for actor in receivers],), named=named)
        left = self._config.retries
        while True:
            handles = {actor.name: actor.handle for actor in receivers}
            try:
                if self._is_collective:
                    self._meet([source, *receivers])
                return cast("list[Shipped]", self._cluster.run([call], phase="sync"))[0]
            except WorkerDied as died:
                lost = next((actor for actor in receivers if actor.name == died.worker), None)
                if lost is None or not left:
                    raise
                left -= 1
                if self._is_collective:
                    self._part([source, *receivers])
                self._cluster.replace(lost, handles[lost.name], died)

    def _meet(self, members: Sequence[Actor]) -> None:
        """Form the group of these processes, where they are not in one. Raises what a worker raises that cannot."""
        if self._group == [actor.handle for actor in members]:
            return
        timeouts = {"timeout_s": self._config.call_timeout_s, "within_s": self._config.start_timeout_s}
        self._cluster.meet(members, "open_weight_group", "join_weight_group", phase="sync", **timeouts)
        self._group = [actor.handle for actor in members]

    def _part(self, members: Sequence[Actor]) -> None:
        """End a broadcast that cannot come to its end: who is in it waits for one that is gone."""
        self._cluster.aside(members, "leave_weight_group")
        self._group = []


def _names(actors: Sequence[Actor]) -> str:
    return ", ".join(map(str, actors))
