"""Weight sync from the train ranks to separate rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from unirl.core.errors import EchoMismatch, RunFailed
from unirl.core.roles import Policy
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Plan, Stage

from .actors import Actor, Call, WorkerDied
from .carrier_choice import carrier_between, sender_of
from .config import RayConfig
from .session import NOTHING, Session
from .weight_ends import Shipped

__all__ = ["WeightSync"]


class WeightSync:
    """All train ranks gather each tensor together; rank 0 sends it to the rollout workers, and the others drop it. Both
    sides compare checksums.

    All workers receive the same buckets at the same time; with the carrier `cuda-ipc` each has its own sender, and they
    are served one by one. `collective` needs a process group, which is formed before the first transfer and re-formed
    when its members change. Only workers that generate a stage are sent its weights.
    """

    def __init__(self, plan: Plan, config: RayConfig, session: Session) -> None:
        """Raises PlanRejected when the configured carrier cannot reach every rollout worker."""
        self._stages = [stage for stage in plan.stages if stage.backend is not None]
        self._session, self._cluster = session, session.cluster
        self._carrier = (carrier_between(config, session.train, session.rollout), config.carrier_dir)
        self._group: list[Any] = []
        """Handles of the processes in the current group, sender first."""
        self._lent: dict[str, Policy] = {}
        """Learner -> the policy whose weights the rollout workers are sent, where it is not the one that samples."""
        self._config = config
        self._bucket_bytes = config.bucket_mb * 2**20
        for stage in self._stages:
            self._cluster.prepare(
                session.generating(stage.name), "weights.open_receiver", stage.name, carrier=self._carrier
            )
        if self._is_collective:
            # Now rather than at the first transfer: unreachable machines should fail at start-up.
            self._meet([session.train[0], *session.rollout])

    def sync(self, stage: Stage) -> None:
        """Send the current weights of the policy that a stage samples with to every worker that generates it; they are
        then those of all stages of the same engines."""
        version = self._send(stage, self._session.generating(stage.name))
        for other in self._stages:
            if self._is_served_with(other, stage):
                self._session.versions.sampled[other.name] = version

    def is_current(self, stage: str) -> bool:
        """Whether rollouts of a stage use the current weights, and so can be regenerated; true of frozen ones."""
        return all(self._is_current(own) for own in self._stages if own.name == stage)

    def refresh(self, actor: Actor) -> None:
        """Send one worker the weights of the current rollout, of every stage that is current."""
        for stage in self._apart([stage for stage in self._stages if actor.place.hosts(stage.name)]):
            if self._is_current(stage):
                self._send(stage, [actor])

    def check_current(self, actor: Actor) -> None:
        """Raises RunFailed for a worker that is to generate with weights that training has since updated."""
        for stage in self._stages:
            if actor.place.hosts(stage.name) and not self._is_current(stage):
                raise RunFailed(
                    f"launcher: {actor} is new and needs version {self._session.versions.sampled[stage.name]} of the "
                    f"weights; training is at version {self._version(stage)}, and old versions are not kept. Resume "
                    "the run."
                )

    def lend_all(self, learner: str) -> Callable[[Policy], AbstractContextManager[None]]:
        """Context manager factory that lends another policy of a learner to all of its stages."""
        return lambda which: self._lend(learner, which)

    @contextmanager
    def _lend(self, learner: str, which: Policy) -> Iterator[None]:
        """Within the block the rollout workers hold another policy's weights; they need a sync afterwards."""
        stages = [stage for stage in self._stages if stage.learner.name == learner and stage.needs.sampler != which]
        if not stages:
            yield
            return
        self._lent[learner] = which
        try:
            for stage in self._apart(stages):
                self._send(stage, self._session.generating(stage.name))
            yield
        finally:
            del self._lent[learner]
            for stage in stages:
                self._session.versions.sampled[stage.name] = NOTHING

    def _apart(self, stages: Sequence[Stage]) -> list[Stage]:
        """Those stages whose engines serve none of the stages before."""
        result: list[Stage] = []
        for stage in stages:
            if not any(self._is_served_with(stage, other) for other in result):
                result.append(stage)
        return result

    def _is_served_with(self, stage: Stage, other: Stage) -> bool:
        """Whether the same engines of the same workers generate both."""
        first, second = ([actor.name for actor in self._session.generating(one.name)] for one in (stage, other))
        return stage.shares_engine(other) and first == second

    def _policy(self, stage: Stage) -> Policy:
        return self._lent.get(stage.learner.name, stage.needs.sampler)

    def _version(self, stage: Stage) -> int:
        return self._session.version_of(stage.learner.name, stage.needs.sampler)

    def _is_current(self, stage: Stage) -> bool:
        return self._session.versions.sampled[stage.name] == self._version(stage)

    def _send(self, stage: Stage, receivers: Sequence[Actor]) -> int:
        """Returns the version that they now hold."""
        cluster, train, policy = self._cluster, self._session.train, self._policy(stage)
        version = self._session.version_of(stage.learner.name, policy)
        # Engines of one stage are alike.
        (dtypes,) = cluster.call(receivers[:1], "weights.dtypes", stage.name, phase="sync")
        self._session.turns.train()
        named = {"policy": policy, "kind": _kind_of(stage), "dtypes": dtypes}
        cluster.call(train, "weights.hold_export", stage.learner.name, phase="sync", **named)
        self._session.turns.rollout()
        for together in [[actor] for actor in receivers] if self._carrier[0] == "cuda-ipc" else [receivers]:
            shipped = self._shipped(stage, together)
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

    def _shipped(self, stage: Stage, receivers: Sequence[Actor]) -> Shipped:
        """Send to the workers, and again to all of them if one died and was replaced."""
        source = sender_of(receivers[0], self._carrier[0], self._session.train)
        named = {"carrier": self._carrier, "bucket_bytes": self._bucket_bytes}
        names = [actor.name for actor in receivers]
        ship = Call(actor=source, method="weights.ship", args=(stage.name, names), named=named)
        others = [Call(actor=actor, method="weights.assist") for actor in self._session.train if actor is not source]
        left = dict.fromkeys(names, self._config.retries)
        while True:
            handles = {actor.name: actor.handle for actor in receivers}
            try:
                if self._is_collective:
                    self._meet([source, *receivers])
                shipped, *_ = self._cluster.run([ship, *others], phase="sync")
                return shipped
            except WorkerDied as died:
                lost = next((actor for actor in receivers if actor.name == died.worker), None)
                if lost is None or not left[lost.name]:
                    raise
                left[lost.name] -= 1
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


def _kind_of(stage: Stage) -> Literal["full", "lora", "merged"]:
    """Kind of weights that a stage's engine takes."""
    assert stage.backend is not None
    spec = stage.engine.spec
    if stage.backend.config.trains == "full":
        return "full"
    takes_lora = bool(spec.capabilities & {Cap.WEIGHTS_SHARED, Cap.WEIGHTS_LORA})
    return "lora" if takes_lora else "merged"


def _names(actors: Sequence[Actor]) -> str:
    return ", ".join(map(str, actors))
