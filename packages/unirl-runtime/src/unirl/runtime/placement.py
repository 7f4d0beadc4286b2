"""Resources each worker needs, checked against the machines before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .config import RayConfig

__all__ = ["Node", "WorkerPlace", "misfit", "places"]

Role = Literal["train", "rollout", "reference", "reward"]


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """One worker process and its resources."""

    name: str
    """`train-0`: unique in the run."""
    role: Role
    index: int
    """Rank, or index among the workers of its role."""
    stages: tuple[str, ...] = ()
    """Stages that a rollout worker generates; empty is all."""
    cpus: float
    gpus: float
    device: int | None = None
    """Workers with the same number share a device, and so a machine."""

    def hosts(self, stage: str) -> bool:
        return not self.stages or stage in self.stages


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster and its free resources."""

    name: str
    cpus: float
    gpus: float


def places(config: RayConfig, *, on_cuda: bool, stages: Sequence[str] = ()) -> list[WorkerPlace]:
    """Every worker of a run, train ranks first.  stages: of the plan, for those with workers of their own."""
    gpus = config.gpus if config.gpus >= 0 else float(on_cuda)
    is_shared = config.placement == "colocate"
    part = 0.5 if is_shared else 1.0
    counts: list[tuple[Role, int, float, float]] = [("train", config.train_ranks, config.cpus * part, gpus * part)]
    if config.placement != "trainside":
        workers = config.train_ranks if is_shared else config.rollout_workers
        workers = len(_pools(config, stages)) or workers
        counts.append(("rollout", workers, config.cpus * part, gpus * part))
    if config.reference == "separate":
        counts.append(("reference", config.reference_workers, config.cpus, gpus))
    counts.append(("reward", config.reward_workers, config.reward_cpus, config.reward_gpus))
    pools = _pools(config, stages) if config.placement == "separate" else []
    return [
        WorkerPlace(
            name=f"{role}-{index}",
            role=role,
            index=index,
            stages=pools[index] if role == "rollout" and pools else (),
            cpus=cpus,
            gpus=gpu,
            device=index if is_shared and role in ("train", "rollout") else None,
        )
        for role, count, cpus, gpu in counts
        for index in range(count)
    ]


def _pools(config: RayConfig, stages: Sequence[str]) -> list[tuple[str, ...]]:
    """Stages of each rollout worker; empty where every worker generates all of them."""
    if not config.stage_workers:
        return []
    others = tuple(stage for stage in stages if stage not in config.stage_workers)
    own = [(stage,) for stage, number in config.stage_workers.items() for _ in range(number)]
    return [*([others] * config.rollout_workers if others else []), *own]


def misfit(workers: Sequence[WorkerPlace], nodes: Sequence[Node]) -> str:
    """Why these workers do not fit on these machines, with the arithmetic; empty when they do.

    The largest worker is placed first, on the first machine with room, as Ray packs them.
    """
    amounts: list[tuple[str, Callable[[WorkerPlace], float], Callable[[Node], float]]] = [
        ("CPUs", lambda worker: worker.cpus, lambda node: node.cpus),
        ("GPUs", lambda worker: worker.gpus, lambda node: node.gpus),
    ]
    for what, of_worker, of_node in amounts:
        expected, there = sum(of_worker(w) for w in workers), sum(of_node(n) for n in nodes)
        if expected > there + 1e-9:
            machines = ", ".join(f"{node.name} {of_node(node):g}" for node in nodes) or "no machine"
            return f"{expected:g} {what} are needed ({_sum(workers, of_worker)}); {there:g} are free ({machines})."
    free = [(node.name, [node.cpus, node.gpus]) for node in nodes]
    together: dict[int | str, list[WorkerPlace]] = {}
    for worker in workers:
        together.setdefault(worker.name if worker.device is None else worker.device, []).append(worker)
    units = [(sum(w.cpus for w in unit), sum(w.gpus for w in unit), unit) for unit in together.values()]
    for cpus, gpus, unit in sorted(units, key=lambda item: (-item[1], -item[0])):
        room = next((f for _, f in free if f[0] + 1e-9 >= cpus and f[1] + 1e-9 >= gpus), None)
        if room is None:
            left = ", ".join(f"{name} {here:g} CPUs {there:g} GPUs" for name, (here, there) in free)
            names = " and ".join(repr(worker.name) for worker in unit)
            who = f"worker {names} needs" if len(unit) == 1 else f"workers {names} need"
            return f"{who} {cpus:g} CPUs and {gpus:g} GPUs on one machine; the machines have {left} left."
        room[0] -= cpus
        room[1] -= gpus
    return ""


def _sum(workers: Sequence[WorkerPlace], of_worker: Callable[[WorkerPlace], float]) -> str:
    counted = Counter((worker.role, of_worker(worker)) for worker in workers)
    return " + ".join(f"{count} {role} x {amount:g}" for (role, amount), count in counted.items() if amount)
