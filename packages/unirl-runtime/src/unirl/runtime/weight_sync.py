"""Weight sync from the train ranks to separate rollout workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from unirl.core.errors import EchoMismatch, RunFailed
from unirl.core.roles import Policy
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.plan import Plan

from .actors import Actor, Call, WorkerDied
from .carrier_choice import carrier_between, sender_of
from .config import RayConfig
from .session import NOTHING, Session
from .weight_ends import Shipped

__all__ = ["WeightSync"]


class WeightSync:
    """All ranks export collectively; rank 0 sends to the rollout workers, and both sides compare checksums.

    With the carrier `collective` all workers receive the same buckets at once, in a process group formed before the
    first transfer and re-formed when its members change. With any other carrier, workers are served one by one.
    """

    def __init__(self, plan: Plan, config: RayConfig, session: Session) -> None:
        """Raises PlanRejected when the configured carrier cannot reach every rollout worker."""
        spec = plan.engine.spec
        is_shared = spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE
        trains = plan.backend.config.trains
        takes_lora = is_shared or spec.support(Cap.WEIGHTS_LORA) is Support.NATIVE
        self._kind: Literal["full", "lora", "merged"] = (
            "full" if trains == "full" else ("lora" if takes_lora else "merged")
        )
        self._session, self._cluster = session, session.cluster
        self._carrier = (carrier_between(config, session.train, session.rollout), config.carrier_dir)
        self._group: list[Any] = []
        """Handles of the processes in the current group, sender first."""
        self._sampler: Policy = plan.needs.sampler
        self._policy: Policy = self._sampler
        """Whose weights the rollout workers are sent."""
        self._config = config
        self._bucket_bytes = config.bucket_mb * 2**20
        self._cluster.prepare(session.rollout, "weights.open_receiver", carrier=self._carrier)
        if self._is_collective:
            # Now rather than at the first transfer: unreachable machines should fail at start-up.
            self._meet([session.train[0], *session.rollout])

    def sync(self) -> None:
        """Send the current weights of the policy that samples to every rollout worker."""
        self._session.versions.sampled = self._send(self._session.rollout)

    @property
    def are_current(self) -> bool:
        """Whether rollouts use the current weights, and so can be regenerated."""
        return self._session.versions.sampled == self._session.version_of(self._sampler)

    def refresh(self, actor: Actor) -> None:
        """Send the current rollout's weights to one worker. Raises RunFailed if training has since updated them."""
        if not self.are_current:
            raise RunFailed(
                f"launcher: {actor} is new and needs version {self._session.versions.sampled} of the weights; training "
                f"is at version {self._session.version_of(self._sampler)}, and old versions are not kept. Resume the "
                "run."
            )
        self._send([actor])

    @contextmanager
    def lend(self, which: Policy) -> Iterator[None]:
        """Within the block the rollout workers hold another policy's weights; they need a sync afterwards."""
        if which == self._sampler:
            yield
            return
        self._policy = which
        try:
            self._send(self._session.rollout)
            yield
        finally:
            self._policy = self._sampler
            self._session.versions.sampled = NOTHING

    def _send(self, receivers: Sequence[Actor]) -> int:
        """Returns the version that they now hold."""
        cluster, train, version = self._cluster, self._session.train, self._session.version_of(self._policy)
        self._session.turns.train()
        cluster.call(train, "weights.hold_export", policy=self._policy, kind=self._kind, phase="sync")
        self._session.turns.rollout()
        for together in [receivers] if self._is_collective else [[actor] for actor in receivers]:
            shipped = self._shipped(together)
            report = shipped.report
            if report.receipt.version != version:
                raise EchoMismatch(
                    f"weights: training is at version {version}, but {_names(together)} holds "
                    f"{report.receipt.version} after the sync."
                )
            size = report.size_bytes * len(together) + shipped.announced_bytes
            count = report.num_tensors * len(together)
            cluster.traffic.synced(size_bytes=size, tensors=count, seconds=report.seconds)
        cluster.call(train, "weights.forget_export", phase="sync")
        return version

    @property
    def _is_collective(self) -> bool:
        return self._carrier[0] == "collective"

    def _shipped(self, receivers: Sequence[Actor]) -> Shipped:
        """Send to the workers, and again if one of them died and was replaced."""
        source = sender_of(receivers[0], self._carrier[0], self._session.train)
        named = {"carrier": self._carrier, "bucket_bytes": self._bucket_bytes}
        call = Call(actor=source, method="weights.ship", args=([actor.name for actor in receivers],), named=named)
        left = self._config.retries
        while True:
            handles = {actor.name: actor.handle for actor in receivers}
            try:
                if self._is_collective:
                    self._meet([source, *receivers])
                (shipped,) = self._cluster.run([call], phase="sync")
                return shipped
            except WorkerDied as died:
                lost = next((actor for actor in receivers if actor.name == died.worker), None)
                if lost is None or not left:
                    raise
                left -= 1
                if self._is_collective:
                    self._part([source, *receivers])
                self._cluster.replace(lost, handles[lost.name], died)

    def _meet(self, members: Sequence[Actor]) -> None:
        """Form a process group of these workers unless it exists. Raises what a worker that cannot join raises."""
        if self._group == [actor.handle for actor in members]:
            return
        timeouts = {"timeout_s": self._config.call_timeout_s, "within_s": self._config.start_timeout_s}
        self._cluster.meet(members, "weights.open_group", "weights.join_group", phase="sync", **timeouts)
        self._group = [actor.handle for actor in members]

    def _part(self, members: Sequence[Actor]) -> None:
        """Abort a broadcast that cannot complete because a member is gone."""
        self._cluster.aside(members, "weights.leave_group")
        self._group = []


def _names(actors: Sequence[Actor]) -> str:
    return ", ".join(map(str, actors))
