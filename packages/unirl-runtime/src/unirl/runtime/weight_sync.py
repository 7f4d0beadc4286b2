"""Weights from the train ranks to rollout workers that hold their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from unirl.core.capability import Cap, Support
from unirl.core.config import BackendConfig
from unirl.core.errors import EchoMismatch, PlanRejected, RunFailed
from unirl.core.plan import Plan
from unirl.core.roles import Policy

from .actors import Actor, Call, WorkerDied
from .cluster import Cluster
from .config import RayConfig
from .turns import Turns
from .worker import Shipped

if TYPE_CHECKING:
    from .remote_parts import RemoteBackend, RemoteEngine

__all__ = ["WeightSync", "carrier_between"]

NOTHING = -1
"""The version of an engine whose weights are not those of any version that trained here."""


class WeightSync:
    """All ranks export together; rank 0 sends to each rollout worker, and both sides compare checksums."""

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
        self._carrier = (
            carrier_between(config, {actor.facts.host for actor in (train[0], *rollout)}),
            config.carrier_dir,
        )
        self._policy: Policy = "live"
        self._retries = config.retries
        self._bucket_bytes = config.bucket_mb * 2**20
        cluster.prepare(self._rollout, "open_receiver", carrier=self._carrier)

    def between(self, backend: RemoteBackend, engine: RemoteEngine) -> None:
        self._backend, self._engine = backend, engine
        backend.lend = self.lend
        # Rollout workers start from the checkpoint, and from adapters that a seed gave; the first sync settles both.
        engine.note_version(NOTHING)

    def sync(self) -> None:
        """Bring the weights that train to every rollout worker."""
        self._send(self._rollout)
        self._engine.note_version(self._backend.version)

    def refresh(self, actor: Actor) -> None:
        """Bring the weights of the rollout that is being made to one worker. Raises RunFailed when training went on."""
        version = self._engine.version
        if version != self._backend.version:
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
        cluster, source = self._cluster, self._train[0]
        self._turns.train()
        cluster.call(self._train, "export_weights", policy=self._policy, kind=self._kind, phase="sync")
        self._turns.rollout()
        for actor in receivers:
            named = {"carrier": self._carrier, "bucket_bytes": self._bucket_bytes}
            call = Call(actor=source, method="ship_weights", args=(actor.name,), named=named)
            shipped = self._shipped(call, actor)
            report = shipped.report
            if report.receipt.version != self._backend.version:
                raise EchoMismatch(
                    f"weights: version {self._backend.version} trains; {actor} holds {report.receipt.version} after "
                    "the sync."
                )
            size = report.size_bytes + shipped.announced_bytes
            cluster.traffic.synced(size_bytes=size, tensors=report.num_tensors, seconds=report.seconds)
        cluster.call(self._train, "forget_export", phase="sync")

    def _shipped(self, call: Call, receiver: Actor) -> Shipped:
        """Ship to a worker, and to the one that replaces it when it dies."""
        left = self._retries
        while True:
            handle = receiver.handle
            try:
                return cast("list[Shipped]", self._cluster.run([call], phase="sync"))[0]
            except WorkerDied as died:
                if died.worker != receiver.name or not left:
                    raise
                left -= 1
                self._cluster.replace(receiver, handle, died)


def carrier_between(config: RayConfig, hosts: set[str]) -> str:
    """Name of the carrier that reaches workers on these machines. Raises PlanRejected for one that does not."""
    name = config.carrier
    if name == "auto":
        name = "shared-memory" if len(hosts) == 1 else "disk" if config.carrier_dir else "ray"
    there = ", ".join(sorted(hosts))
    if name == "shared-memory" and len(hosts) > 1:
        raise PlanRejected(
            f"launcher.carrier: 'shared-memory' was asked for; the workers are on {there}. Use 'ray', or "
            "'disk' with a carrier_dir that all of them see."
        )
    return name
