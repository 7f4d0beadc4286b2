"""The launcher `ray`: workers on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unirl.core.errors import PlanRejected, RunFolderError
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap
from unirl.core.specs.check import check_config
from unirl.core.specs.plan import Plan
from unirl.loop.build import build_algorithms, reward_weights
from unirl.loop.parts import LauncherReport, Parts
from unirl.loop.run_folder import LOCK_FILE

from .actors import Actor, Call
from .cluster import Cluster
from .config import RayConfig, devices_of
from .placement import by_machine, misfit, places, split_groups
from .remote_parts import RemoteBackend, RemoteEngine, RemoteModel, RemoteReward
from .samples import Samples
from .session import NOTHING, Session, WeightVersions
from .turns import Turns
from .weight_sync import WeightSync

__all__ = ["RayLauncher", "build"]

SHOWN_WITHIN_S = 60.0
"""NFS keeps what it knows of a folder for up to a minute."""


def build(config: RayConfig) -> RayLauncher:
    """Raises RecipeError for invalid settings."""
    check_config(config, key="launcher")
    return RayLauncher(config)


class RayLauncher:
    """Ray workers; the driver runs the loop, builds requests and advantages, and holds references to tensors."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._cluster: Cluster | None = None

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        config = self._config
        self._cluster = cluster = Cluster(config)
        try:
            nodes = cluster.nodes()
            if config.reference == "separate":
                _check_reference(plan)
            on_cuda = _on_cuda(plan, sum(node.gpus for node in nodes))
            stages = {stage.name: devices_of(stage) for stage in plan.stages}
            workers = places(config, on_cuda=on_cuda, stages=stages, rewards=config.reward_processes(plan))
            reason = misfit(workers, nodes)
            if reason:
                raise PlanRejected(f"launcher: the workers do not fit: {reason}")
            actors = cluster.start(workers, plan)
            by_role: dict[str, list[Actor]] = {role: [] for role in ("train", "rollout", "reference", "reward")}
            for actor in actors:
                by_role[actor.place.role].append(actor)
            by_role["train"] = by_machine(by_role["train"])
            cluster.findings += [
                finding
                for one in plan.learners.values()
                if one.backend is not None
                for finding in split_groups(by_role["train"], vars(one.backend.config).get("mesh"))
            ]
            return self._parts(plan, catalog, cluster, by_role)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _parts(self, plan: Plan, catalog: Catalog, cluster: Cluster, by_role: dict[str, list[Actor]]) -> Parts:
        session = self._session(plan, cluster, by_role)
        weights = WeightSync(plan, self._config, session) if session.rollout else None
        samples = Samples(cluster, weights, retries=self._config.retries)
        learners = plan.learners
        return Parts(
            models={
                name: RemoteModel(learner.model.spec, cluster, session.train[0], learner=name)
                for name, learner in learners.items()
            },
            backends={
                name: RemoteBackend(
                    session,
                    samples,
                    learner=name,
                    references=by_role["reference"] if name in _asking_for_reference(plan) else (),
                    lend=weights.lend_all(name) if weights else None,
                )
                for name, learner in learners.items()
                if learner.backend is not None
            },
            engines={stage.name: RemoteEngine(session, samples, stage) for stage in plan.stages},
            algorithms=build_algorithms(plan, catalog=catalog),
            rewards={
                name: RemoteReward(
                    name,
                    session,
                    samples,
                    scores_groups=Cap.REWARD_GROUP in choice.spec.capabilities,
                    frames=choice.config.frames_read,
                )
                for name, choice in plan.rewards.items()
            },
            reward_weights=reward_weights(plan),
            sync=weights.sync if weights else None,
            report=lambda: _report(cluster),
            device_name=session.train[0].facts.device_name,
        )

    def _session(self, plan: Plan, cluster: Cluster, by_role: dict[str, list[Actor]]) -> Session:
        """Build every worker's parts."""
        config, train, rollout = self._config, by_role["train"], by_role["rollout"]
        _check_run_folder(plan, cluster, train)
        if len(train) > 1:
            timeouts = {"timeout_s": config.call_timeout_s, "within_s": config.start_timeout_s}
            cluster.meet(train, "open_group", "join_group", phase="build", **timeouts)
        self._build(cluster, by_role)
        trained, *_ = cluster.call(train, "versions", phase="build")
        frozen = {stage.name for stage in plan.stages if stage.backend is None}
        return Session(
            cluster=cluster,
            train=train,
            rollout=rollout,
            reference=by_role["reference"],
            reward=by_role["reward"],
            copies={name: one.backend.config.copies if one.backend else 1 for name, one in plan.learners.items()},
            turns=Turns(cluster, train=train, rollout=rollout, is_shared=config.placement == "colocate"),
            # Rollout workers start from the checkpoint and seeded adapters; the first sync replaces both.
            versions=WeightVersions(
                trained=trained,
                sampled={stage.name: NOTHING if rollout and stage.name not in frozen else 0 for stage in plan.stages},
            ),
        )

    def _build(self, cluster: Cluster, by_role: dict[str, list[Actor]]) -> None:
        """Build all workers' parts concurrently; on shared devices, rollout workers after the train ranks."""
        roles = by_role
        if self._config.placement == "colocate":
            cluster.prepare(by_role["train"], "build", "train", with_engine=False)
            cluster.call(by_role["train"], "offload", phase="offload")
            cluster.prepare(by_role["rollout"], "build", "rollout")
            cluster.call(by_role["rollout"], "sleep", phase="sleep")
            cluster.call(by_role["train"], "onload", phase="onload")
            roles = {role: by_role[role] for role in ("reference", "reward")}
        generates = "rollout" if by_role["rollout"] else "train"
        builds = [
            Call(
                actor=actor,
                method="build",
                args=(role,),
                named={"with_engine": role == generates, "serves": actor.place.serves},
            )
            for role, actors in roles.items()
            for actor in actors
        ]
        cluster.run(builds, phase="build", timeout_s=cluster.build_timeout_s)
        for call in builds:
            call.actor.setup.append((call.method, call.args, call.named))


def _asking_for_reference(plan: Plan) -> set[str]:
    """Learners whose algorithms compare with the reference policy."""
    return {stage.learner.name for stage in plan.trained if stage.needs.reference != "none"}


def _check_reference(plan: Plan) -> None:
    """Raise PlanRejected where nothing asks for reference workers."""
    if not _asking_for_reference(plan):
        names = ", ".join(repr(stage.parts["algorithm"].name) for stage in plan.trained)
        raise PlanRejected(
            f"launcher.reference: got 'separate', but algorithm {names} uses no reference policy as configured. Use "
            "trainside, or enable its KL penalty."
        )


def _check_run_folder(plan: Plan, cluster: Cluster, train: Sequence[Actor]) -> None:
    """Raise RunFolderError unless every train rank sees the run folder, in which it will save its shards."""
    lock = Path(plan.run.dir) / LOCK_FILE
    if not plan.run.dir or not lock.is_file():
        return  # Launched outside of a run, which saves nothing.
    here = lock.read_text(encoding="utf-8")
    texts = cluster.call(train, "text_of", lock, within_s=SHOWN_WITHIN_S, phase="start")
    blind = [str(actor) for actor, text in zip(train, texts, strict=True) if text != here]
    if blind:
        raise RunFolderError(
            f"run.dir: {lock.parent} is another folder for {', '.join(blind)}, or none: every train rank saves its "
            "shards of a checkpoint there. Use a folder on a file system that all machines share."
        )


def _report(cluster: Cluster) -> LauncherReport:
    findings, cluster.findings = cluster.findings, []
    return LauncherReport(metrics=cluster.traffic.take(), findings=findings)


def _on_cuda(plan: Plan, gpus: float) -> bool:
    if plan.run.device == "auto":
        return gpus > 0
    if plan.run.device.startswith("cuda") and gpus <= 0:
        raise PlanRejected(f"run.device: got {plan.run.device!r}, but no machine of the cluster has a GPU.")
    return plan.run.device.startswith("cuda")
