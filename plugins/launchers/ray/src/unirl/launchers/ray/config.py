"""Settings of the launcher `ray`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.names import did_you_mean
from unirl.core.specs.capability import Cap
from unirl.core.specs.memory import Processes, RewardProcesses
from unirl.core.specs.part_config import code_of_variables
from unirl.loop.config import OffloadingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["RayConfig"]

_SHARED_POOL = ("reward_workers", "reward_gpus")
"""Keys of the workers that several rewards share."""


@dataclass
class RayConfig(OffloadingConfig):
    """Single controller: the driver runs the loop; workers hold the models and tensors."""

    address: str = ""
    """Cluster to join, `auto` or `host:port` of its head. Empty takes Ray's own variable `RAY_ADDRESS`, else starts one
    on this machine for the run."""
    placement: str = one_of("trainside", "separate", "colocate", default="trainside")
    """`trainside`: each train rank samples with the module it trains. `separate`: dedicated rollout workers, which
    receive the weights before each step. `colocate`: as `separate`, but each train rank shares its device with a
    rollout worker; the two take turns, and the rollout worker gets half of the rank's `cpus` and `gpus`."""
    reference: str = one_of("trainside", "separate", default="trainside")
    """Where the reference policy runs, if the algorithm needs one. `trainside`: on the train ranks, by disabling
    adapters or from a copy. `separate`: on dedicated workers, before each training phase."""
    train_ranks: int = limit(1, least=1)
    """Number of training processes."""
    rollout_workers: int = limit(1, least=1)
    """Number of rollout processes, with `placement: separate`."""
    stage_workers: dict[str, int] = limit(
        dict[str, int](), least=1, hint="Leave a stage out to share `rollout_workers`."
    )
    """Stage -> number of dedicated rollout processes, which hold only its model, with `placement: separate`. Other
    stages share `rollout_workers`."""
    reference_workers: int = limit(1, least=1)
    """Number of reference-policy processes, with `reference: separate`."""
    reward_workers: int = limit(0, least=0)
    """Number of reward processes; each builds all rewards without dedicated ones, and scores a share of the samples. 0
    is one for each train rank."""
    dedicated_rewards: dict[str, int] = limit(
        dict[str, int](), least=1, hint="Leave a reward out to share `reward_workers`."
    )
    """Reward, by its key under `reward` -> number of dedicated processes, which build only this reward. Other rewards
    share `reward_workers`."""
    cpus: float = limit(1.0, least=0)
    """CPUs of each train rank, rollout and reference worker, as Ray counts them; fractions share one."""
    gpus: float = limit(-1.0, least=-1)
    """GPUs of each train rank, rollout and reference worker; fractions share one. -1 is one on CUDA, else none. Rollout
    workers whose engine splits its model (`engine.tensor_parallel`) get as many times that."""
    reward_cpus: float = limit(0.5, least=0)
    """CPUs of each reward worker."""
    reward_gpus: float = limit(-1.0, least=-1)
    """GPUs of each reward worker, besides those of the train ranks; fractions share one. 0 is none: its rewards compute
    on CPUs. -1: on CUDA, a worker with a reward that loads weights shares the device of one train rank; else none."""
    dedicated_gpus: dict[str, float] = limit(dict[str, float](), least=-1, hint="Leave it out for `reward_gpus`.")
    """Reward -> GPUs of each of its dedicated processes, in place of `reward_gpus`."""
    carrier: str = one_of("auto", "shared-memory", "ray", "disk", "collective", "cuda-ipc", default="auto")
    """Weight transport to separate rollout workers. `shared-memory`: within one machine. `ray`: in Ray calls, to any
    machine of the cluster. `disk`: through `carrier_dir`. `collective`: broadcast to all workers at once (gloo on
    CPUs, NCCL where each worker has its own GPU). `cuda-ipc`: within a shared GPU. `auto`: shared memory if all
    workers are on one machine, else `carrier_dir` if set, else Ray."""
    carrier_dir: str = ""
    """Folder shared by all machines, for the carrier `disk`."""
    bucket_mb: int = limit(256, least=1)
    """Size of a weight-transfer bucket, in MiB."""
    object_store_mb: int = limit(512, least=80)
    """Ray object store, in MiB, if this run starts the cluster. It need not hold whole rollouts."""
    num_cpus: int = limit(0, least=0)
    """CPUs declared to a cluster started here; 0 uses the machine's count."""
    start_timeout_s: float = limit(300.0, above=0)
    """Timeout for a worker to start, and to build its parts; starting an external engine has `engine.start_timeout_s`
    in addition."""
    call_timeout_s: float = limit(3600.0, above=0)
    """Timeout for one phase of a step on a worker; the run then fails and names the worker that did not answer."""
    retries: int = limit(1, least=0)
    """How often a call is retried on a new process after its reward or rollout worker died or hung. These workers can
    be rebuilt, and a sample's noise depends only on its seed. 0 fails the run. A dead train rank always fails it."""
    environment: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Environment variables of the workers."""

    def named_code(self) -> Mapping[str, str | Path]:
        return code_of_variables(".environment", self.environment)

    @property
    def processes(self) -> Processes:
        """Train ranks, and the workers of this placement."""
        is_colocated = self.placement == "colocate"
        rollout = {"trainside": 0, "separate": self.rollout_workers, "colocate": self.train_ranks}[self.placement]
        return Processes(
            train=self.train_ranks,
            rollout=rollout,
            reference=self.reference_workers if self.reference == "separate" else 0,
            is_colocated=is_colocated,
            bucket_bytes=self.bucket_mb * 2**20 if rollout else 0,
            receives_on_device=self.carrier in ("collective", "cuda-ipc"),
        )

    def reward_processes(self, plan: Plan) -> Sequence[RewardProcesses]:
        """One entry for the reward workers that are shared, and one for each reward with its own."""
        rewards = {name: choice.config.device_weights() for name, choice in plan.rewards.items()}
        others = tuple(name for name in rewards if name not in self.dedicated_rewards)
        pools = [(others, self.reward_workers or self.train_ranks)] if others else []
        pools += [((name,), workers) for name, workers in self.dedicated_rewards.items()]
        result: list[RewardProcesses] = []
        for names, count in pools:
            # Only dedicated workers may have their own GPUs.
            gpus = self.dedicated_gpus.get(names[0], self.reward_gpus)
            shares = (
                gpus < 0 and self.gpus != 0 and plan.run.device != "cpu" and any(rewards.get(name) for name in names)
            )
            result.append(
                RewardProcesses(
                    rewards=names,
                    count=count,
                    device="shared" if shares else "own" if gpus > 0 else "none",
                    gpus=max(gpus, 0.0),
                )
            )
        return result

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Devices, carriers and engines that are incompatible with the placement."""
        yield from super().problems(plan, stage)
        if self.placement == "colocate" and self.gpus > 1:
            yield Reason(
                key=".gpus",
                text=f"got {self.gpus:g}; with colocate a train rank and a rollout worker share 1.",
            )
        for name in self.dedicated_gpus.keys() - self.dedicated_rewards.keys():
            text = f"this reward has no dedicated workers; set launcher.dedicated_rewards.{name}."
            yield Reason(key=f".dedicated_gpus.{name}", text=text)
        if self.carrier == "disk" and not self.carrier_dir:
            yield Reason(key=".carrier_dir", text="the carrier 'disk' needs a folder shared by all machines; set one.")
        if plan is None or stage is None:
            return
        yield from self._own_workers([each.name for each in plan.stages])
        yield from self._reward_devices(plan)
        if self.gpus == 0 and plan.run.device.startswith("cuda"):
            yield Reason(
                key=".gpus",
                text=f"got 0, but run.device is {plan.run.device!r}; workers without a GPU compute on CPUs. Use -1 for "
                "one GPU each.",
            )
        for name in self.dedicated_rewards:
            if name not in plan.rewards:
                known = ", ".join(map(repr, plan.rewards))
                text = f"no such reward; the rewards are {known}{did_you_mean(name, plan.rewards) or '.'}"
                yield Reason(key=f".dedicated_rewards.{name}", text=text)
        yield from self._split_engine(stage)
        if self.carrier == "cuda-ipc":
            yield from self._without_shared_memory(plan.run.device)
        if self.placement == "colocate":
            yield from _memory_kept(stage)
        copies = 1 if stage.backend is None else stage.backend.config.copies
        if self.train_ranks % copies:
            yield Reason(
                key=".train_ranks",
                text=f"got {self.train_ranks}, expected a multiple of the {copies} ranks that get the same rows: "
                "mesh.tensor x mesh.sequence.",
            )
        engine = stage.engine.spec
        if (
            self.placement == "trainside"
            and stage.backend is not None
            and Cap.WEIGHTS_SHARED not in engine.capabilities
        ):
            yield Reason(
                key=".placement",
                text=f"got 'trainside', where each train rank samples with the module it trains; engine "
                f"{engine.name!r} keeps its own weights and would never receive the trained ones. Use separate, or "
                "colocate.",
            )

    def _split_engine(self, stage: Stage) -> Iterator[Reason]:
        """Why a rollout worker cannot have the devices that its engine splits its model over."""
        count = devices_of(stage)
        if count > 1 and self.placement != "separate":
            yield Reason(
                key=f"{stage.engine.key}.tensor_parallel",
                text=f"got {count} with launcher.placement={self.placement}, where a rollout worker has the device of "
                "its train rank alone. Use separate, or 1.",
            )
        elif count > 1 and 0 < self.gpus < 1:
            yield Reason(
                key=".gpus",
                text=f"got {self.gpus:g} with {stage.engine.key}.tensor_parallel={count}, expected 1, or -1 for one "
                "each: an engine that splits its model needs whole devices.",
            )

    def _own_workers(self, stages: Sequence[str]) -> Iterator[Reason]:
        for name, number in self.stage_workers.items():
            key = f".stage_workers.{name}"
            if name not in stages:
                yield Reason(key=key, text=f"no such stage; the stages are {', '.join(map(repr, stages))}.")
            elif self.placement != "separate":
                yield Reason(
                    key=key,
                    text=f"got {number}, but launcher.placement={self.placement} has no rollout workers to divide. Use "
                    "separate.",
                )

    def _reward_devices(self, plan: Plan) -> Iterator[Reason]:
        """Reward workers that are to share the devices of train ranks and cannot."""
        pools = [pool for pool in self.reward_processes(plan) if pool.device == "shared"]
        if pools and self.gpus > 1:
            yield Reason(
                key=".gpus",
                text=f"got {self.gpus:g}; reward workers share the devices of train ranks with 1 at most. Set "
                "launcher.reward_gpus to the GPUs of each; 0 scores on CPUs.",
            )
        for pool in pools:
            name = pool.rewards[0]
            is_own = name in self.dedicated_rewards
            key, gpus = (f"dedicated_rewards.{name}", f"dedicated_gpus.{name}") if is_own else _SHARED_POOL
            if pool.count > self.train_ranks:
                yield Reason(
                    key=f".{key}",
                    text=f"got {pool.count}, expected at most launcher.train_ranks={self.train_ranks}, because each "
                    f"shares the device of a train rank. Set launcher.{gpus} to the GPUs of each; 0 scores on CPUs.",
                )

    def _without_shared_memory(self, device: str) -> Iterator[Reason]:
        if device == "cpu":
            yield Reason(
                key=".carrier",
                text="got 'cuda-ipc', but run.device is 'cpu', so there is no GPU memory to share. Use "
                "'shared-memory'.",
            )
        elif self.placement == "separate" and (self.gpus < 0 or self.gpus >= 1):
            yield Reason(
                key=".carrier",
                text="got 'cuda-ipc', but with 'separate' and launcher.gpus of 1 or more each worker has its own "
                "GPU. Use 'collective', or launcher.placement=colocate.",
            )


def devices_of(stage: Stage) -> int:
    """Devices that an engine of this stage splits its model over."""
    return int(vars(stage.engine.config).get("tensor_parallel", 1))


def _memory_kept(stage: Stage) -> Iterator[Reason]:
    """Reasons the engine could not release the memory of a device it shares with training."""
    spec = stage.engine.spec
    if not spec.capabilities & {Cap.SLEEP, Cap.WEIGHTS_SHARED}:
        yield Reason(
            key=".placement",
            text=f"got 'colocate', but engine {spec.name!r} cannot sleep, so it would hold its memory during "
            "training. Use separate.",
        )
    for key, expected in spec.enabled_by.get(Cap.SLEEP, {}).items():
        result = reduce(getattr, key.split("."), stage.engine.config)
        if result != expected:
            yield Reason(
                key=f"{stage.engine.key}.{key}",
                text=f"got {json.dumps(result)}, but with launcher.placement=colocate training needs that memory in "
                f"turn; set {stage.engine.key}.{key}={json.dumps(expected)}.",
            )
