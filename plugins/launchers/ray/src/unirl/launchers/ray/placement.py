"""Resources each worker needs, checked against the machines before anything starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from unirl.core.specs.memory import RewardProcesses

from .config import RayConfig

if TYPE_CHECKING:
    from .actors import Actor

__all__ = ["Node", "WorkerPlace", "by_machine", "misfit", "places", "split_groups"]

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

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of its process. One without a GPU sees none: whatever runs there could take the
        machine's first."""
        return {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}

    def hosts(self, name: str) -> bool:
        """Whether it generates this stage, or scores this reward."""
        return not self.serves or name in self.serves


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster and its free resources."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """Workers that serve the same."""

    role: Role
    serves: tuple[str, ...] = ()
    count: int
    cpus: float
    gpus: float
    """Of each worker; of all workers together that share the device."""
    is_beside: bool = False
    """Each of them is on the device of the train rank with its number."""


def places(
    config: RayConfig,
    *,
    on_cuda: bool,
    stages: Mapping[str, int] | None = None,
    rewards: Sequence[RewardProcesses] = (),
) -> list[WorkerPlace]:
    """Every worker of a run, train ranks first.

    stages: of the plan, for those with dedicated workers, and the number of devices of an engine of each.  rewards: by
    `RayConfig.reward_processes`.
    """
    devices = stages or {}
    gpus = config.gpus if config.gpus >= 0 else float(on_cuda)
    is_colocated = config.placement == "colocate"
    cpus = config.cpus * (0.5 if is_colocated else 1.0)
    pools: list[_Pool] = []
    if is_colocated:
        pools.append(_Pool(role="rollout", count=config.train_ranks, cpus=cpus, gpus=gpus, is_beside=True))
    elif config.placement == "separate":
        for serves, count in _pools(tuple(devices), config.stage_workers, config.rollout_workers):
            most = max((number for name, number in devices.items() if not serves or name in serves), default=1)
            pools.append(_Pool(role="rollout", serves=serves, count=count, cpus=config.cpus, gpus=gpus * most))
    if config.reference == "separate":
        pools.append(_Pool(role="reference", count=config.reference_workers, cpus=config.cpus, gpus=gpus))
    for reward in rewards:
        is_beside = reward.device == "shared" and gpus > 0
        pools.append(
            _Pool(
                role="reward",
                serves=reward.rewards,
                count=reward.count,
                cpus=config.reward_cpus,
                gpus=gpus if is_beside else reward.gpus,
                is_beside=is_beside,
            )
        )
    beside = [pool.count for pool in pools if pool.is_beside]
    pools.insert(0, _Pool(role="train", count=config.train_ranks, cpus=cpus, gpus=gpus, is_beside=bool(beside)))
    result: list[WorkerPlace] = []
    for pool in pools:
        first = sum(place.role == pool.role for place in result)
        for number in range(pool.count):
            # Ray counts GPUs to 4 decimals.
            sharers = 1 + sum(count > number for count in beside) if pool.is_beside else 1
            result.append(
                WorkerPlace(
                    name=f"{pool.role}-{first + number}",
                    role=pool.role,
                    index=first + number,
                    serves=pool.serves,
                    cpus=pool.cpus,
                    gpus=math.floor(pool.gpus / sharers * 1e4) / 1e4 if pool.is_beside else pool.gpus,
                    device=number if pool.is_beside else None,
                )
            )
    return result


def by_machine(actors: Sequence[Actor]) -> list[Actor]:
    """Train ranks in the order in which groups of neighbours should be formed: those of one machine together, in the
    order of its first rank. Ray starts them on any machine with room."""
    machines = list(dict.fromkeys(actor.facts.host for actor in actors))
    return sorted(actors, key=lambda actor: machines.index(actor.facts.host))


def split_groups(train: Sequence[Actor], mesh: Any) -> Iterator[str]:
    """A warning for each kind of group of neighbours that is on several machines. train: by rank.  mesh: settings of a
    backend, with the sizes of groups as `sequence` and `tensor`; None without any."""
    for name in ("sequence", "tensor"):
        size = int(getattr(mesh, name, 1))
        groups = [train[first : first + size] for first in range(0, len(train), size)]
        split = [group for group in groups if len({actor.facts.host for actor in group}) > 1]
        if split:
            hosts = ", ".join(dict.fromkeys(actor.facts.host for actor in split[0]))
            yield (
                f"backend.mesh.{name}: {len(split)} of {len(groups)} groups of {size} ranks are on several machines, "
                f"such as {hosts}. They exchange activations in every block, which is slow between machines: start a "
                f"multiple of {size} ranks on each."
            )


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
