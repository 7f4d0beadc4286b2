"""The launchers: everything in this process, or workers placed by Ray."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from unirl.core.catalog import Catalog
from unirl.core.errors import PlanRejected
from unirl.core.match import needs_of
from unirl.core.parts import Noted, Parts
from unirl.core.plan import Plan
from unirl.core.roles import Engine
from unirl.core.run import build_algorithm, build_parts, reward_weights

from .actors import Actor, Call
from .cluster import Cluster
from .config import LocalConfig, RayConfig, problems
from .placement import misfit, places
from .remote_parts import RemoteBackend, RemoteEngine, RemoteModel, RemoteReward
from .samples import Samples
from .turns import Turns
from .weight_sync import WeightSync

__all__ = ["LocalLauncher", "RayLauncher", "build_local", "build_ray"]


def build_local(config: LocalConfig) -> LocalLauncher:
    return LocalLauncher()


def build_ray(config: RayConfig) -> RayLauncher:
    """Raises PlanRejected for settings that cannot be."""
    wrong = list(problems(config))
    if wrong:
        raise PlanRejected(" ".join(wrong))
    return RayLauncher(config)


class LocalLauncher:
    """Everything in this process, where a debugger can look at it."""

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        return build_parts(plan, catalog=catalog)

    def close(self) -> None:
        pass


class RayLauncher:
    """Workers under Ray; the driver holds the loop, the algorithm's requests and advantages, and references."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._cluster: Cluster | None = None

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        config = self._config
        self._cluster = cluster = Cluster(config)
        try:
            nodes = cluster.nodes()
            if config.reference == "separate" and needs_of(plan).reference == "none":
                raise PlanRejected(
                    f"launcher.reference: 'separate' was asked for; algorithm {plan.algorithm.name!r} compares with no "
                    "reference policy as it is set. Use trainside, or switch its KL divergence on."
                )
            workers = places(config, on_cuda=_on_cuda(plan, sum(node.gpus for node in nodes)))
            reason = misfit(workers, nodes)
            if reason:
                raise PlanRejected(f"launcher: the workers do not fit: {reason}")
            actors = cluster.start(workers, plan)
            by_role: dict[str, list[Actor]] = {role: [] for role in ("train", "rollout", "reference", "reward")}
            for actor in actors:
                by_role[actor.place.role].append(actor)
            return self._parts(plan, catalog, cluster, by_role)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _parts(self, plan: Plan, catalog: Catalog, cluster: Cluster, by_role: dict[str, list[Actor]]) -> Parts:
        config, train, rollout = self._config, by_role["train"], by_role["rollout"]
        if len(train) > 1:
            timeouts = {"timeout_s": config.call_timeout_s, "within_s": config.start_timeout_s}
            cluster.meet(train, "open_group", "join_group", phase="build", **timeouts)
        self._build(plan, cluster, by_role)
        turns = Turns(cluster, train=train, rollout=rollout, is_shared=config.placement == "colocate")
        copies = _copies(plan, config.train_ranks)
        backend = RemoteBackend(cluster, train, copies=copies, turns=turns, references=by_role["reference"])
        weights = WeightSync(plan, config, cluster, train=train, rollout=rollout, turns=turns) if rollout else None
        samples = Samples(cluster, weights, retries=config.retries)
        engine = RemoteEngine(
            cluster,
            rollout or train,
            # Ranks that hold shards of one module run its forwards together.
            lockstep=not rollout and len(train) > 1,
            copies=1 if rollout else copies,
            turns=turns,
            samples=samples,
        )
        backend.samples = samples
        if weights:
            weights.between(backend, engine)
        return Parts(
            model=RemoteModel(plan.model.spec, cluster, train[0]),
            backend=backend,
            engine=cast(Engine, engine),  # its version is a property, which a protocol's field does not admit
            algorithm=build_algorithm(plan, catalog=catalog),
            rewards={name: RemoteReward(name, cluster, by_role["reward"], samples) for name in plan.rewards},
            reward_weights=reward_weights(plan),
            sync=weights.sync if weights else None,
            noted=lambda: _noted(cluster),
        )

    def _build(self, plan: Plan, cluster: Cluster, by_role: dict[str, list[Actor]]) -> None:
        """Build the parts of all workers at once; where they share devices, rollout workers after the train ranks."""
        if self._config.placement == "colocate":
            cluster.prepare(by_role["train"], "build", "train")
            cluster.call(by_role["train"], "offload", phase="offload")
            cluster.prepare(by_role["rollout"], "build", "rollout")
            cluster.call(by_role["rollout"], "sleep", phase="sleep")
            cluster.call(by_role["train"], "onload", phase="onload")
            cluster.prepare(by_role["reference"], "build", "reference", with_engine=False)
            cluster.prepare(by_role["reward"], "build", "reward")
            return
        generates = "rollout" if by_role["rollout"] else "train"
        builds = [
            Call(actor=actor, method="build", args=(role,), named={"with_engine": role == generates})
            for role, actors in by_role.items()
            for actor in actors
        ]
        cluster.run(builds, phase="build", timeout_s=self._config.start_timeout_s)
        for call in builds:
            call.actor.setup.append((call.method, call.args, call.named))


def _copies(plan: Plan, train_ranks: int) -> int:
    """Neighbouring ranks that get the same rows: those among which a backend splits layers, its `mesh.tensor`."""
    config: Any = plan.backend.config
    has_mesh = "mesh" in {item.name for item in dataclasses.fields(config)}
    copies = int(config.mesh.tensor) if has_mesh else 1
    if train_ranks % copies:
        raise PlanRejected(
            f"backend.mesh.tensor: {copies} was asked for; launcher.train_ranks = {train_ranks} is no multiple of it."
        )
    return copies


def _noted(cluster: Cluster) -> Noted:
    findings, cluster.findings = cluster.findings, []
    return Noted(metrics=cluster.traffic.take(), findings=findings)


def _on_cuda(plan: Plan, gpus: float) -> bool:
    if plan.run.device == "auto":
        return gpus > 0
    if plan.run.device.startswith("cuda") and gpus <= 0:
        raise PlanRejected(f"run.device: {plan.run.device!r} was asked for; no machine of the cluster has a GPU.")
    return plan.run.device.startswith("cuda")
