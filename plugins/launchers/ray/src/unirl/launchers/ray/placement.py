"""Resources each worker needs, checked against the machines before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    serves: tuple[str, ...] = ()
    """Stages that a rollout worker generates, rewards that a reward worker scores; empty is all."""
    cpus: float
    gpus: float
    device: int | None = None
    """Workers with the same number share a device, and so a machine."""

    def hosts(self, name: str) -> bool:
        """Whether it generates this stage, or scores this reward."""
        return not self.serves or name in self.serves


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster and its free resources."""

    name: str
    cpus: float
    gpus: float


def places(
    config: RayConfig, *, on_cuda: bool, stages: Sequence[str] = (), rewards: Sequence[str] = ()
) -> list[WorkerPlace]:
    """Every worker of a run, train ranks first.  stages, rewards: of the plan, for those with dedicated workers."""
    gpus = config.gpus if config.gpus >= 0 else float(on_cuda)
    is_shared = config.placement == "colocate"
    part = 0.5 if is_shared else 1.0
    pools: list[tuple[Role, tuple[str, ...], int, float, float]] = [
        ("train", (), config.train_ranks, config.cpus * part, gpus * part)
    ]
    if is_shared:
        pools.append(("rollout", (), config.train_ranks, config.cpus * part, gpus * part))
    elif config.placement == "separate":
        for serves, count in _pools(stages, config.stage_workers, config.rollout_workers):
            pools.append(("rollout", serves, count, config.cpus, gpus))
    if config.reference == "separate":
        pools.append(("reference", (), config.reference_workers, config.cpus, gpus))
    for serves, count in _pools(rewards, config.dedicated_rewards, config.reward_workers):
        # Only dedicated workers may have their own GPUs.
        gpu = config.dedicated_gpus.get(serves[0] if serves else "", config.reward_gpus)
        pools.append(("reward", serves, count, config.reward_cpus, gpu))
    result: list[WorkerPlace] = []
    for role, serves, count, cpus, gpu in pools:
        first = sum(place.role == role for place in result)
        result += [
            WorkerPlace(
                name=f"{role}-{index}",
                role=role,
                index=index,
                serves=serves,
                cpus=cpus,
                gpus=gpu,
                device=index if is_shared and role in ("train", "rollout") else None,
            )
            for index in range(first, first + count)
        ]
    return result


def _pools(names: Sequence[str], own: Mapping[str, int], shared: int) -> list[tuple[tuple[str, ...], int]]:
    """Names that each pool serves, and its number of workers: the shared pool first, unless each name has its own."""
    if not own:
        return [((), shared)]
    others = tuple(name for name in names if name not in own)
    return [*([(others, shared)] if others else []), *(((name,), workers) for name, workers in own.items())]


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
