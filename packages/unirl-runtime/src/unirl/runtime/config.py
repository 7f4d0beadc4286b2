"""Settings of the launchers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unirl.core.config import PartConfig

__all__ = ["LocalConfig", "RayConfig", "WorkerStoreConfig", "misplaced", "problems"]

REFERENCES = ("trainside", "separate")
PLACEMENTS = ("trainside", "separate", "colocate")
CARRIERS = ("auto", "shared-memory", "ray", "disk", "collective", "cuda-ipc")


@dataclass
class LocalConfig(PartConfig):
    """Nothing to set: everything is built in this process."""


@dataclass
class RayConfig(PartConfig):
    """A single controller: the driver holds the loop, workers hold everything large."""

    address: str = ""
    """Cluster to join, `auto` or `host:port` of its head; empty starts one on this machine for the run."""
    placement: str = "trainside"
    """`trainside`: each train rank samples with the module that it trains. `separate`: rollouts come from workers of
    their own, which are sent the weights before each step. `colocate`: as `separate`, on the devices of the train
    ranks: each has a rollout worker beside it, takes turns with it, and gives it half of its `cpus` and `gpus`."""
    reference: str = "trainside"
    """Who answers for the reference policy, where the algorithm compares with it: `trainside`, the train ranks, by
    switching adapters off or from a copy; `separate`, workers of their own, before each training phase."""
    train_ranks: int = 1
    """Processes that train together."""
    rollout_workers: int = 1
    """Processes that generate, with `separate`."""
    reference_workers: int = 1
    """Processes that hold the reference policy, with `reference: separate`."""
    reward_workers: int = 1
    """Processes that score, each a share of the samples."""
    cpus: float = 1.0
    """CPUs of each train rank, rollout and reference worker, as Ray counts them; fractions share one."""
    gpus: float = -1.0
    """GPUs of each train rank, rollout and reference worker; fractions share one. -1 is one on CUDA, else none."""
    reward_cpus: float = 0.5
    """CPUs of each reward worker."""
    reward_gpus: float = 0.0
    """GPUs of each reward worker."""
    carrier: str = "auto"
    """How weights travel to rollout workers of their own: by `shared-memory` of one machine, in calls of `ray`, which
    reach any machine of the cluster, by `disk` through `carrier_dir`, by `collective` broadcasts to all workers at once
    (gloo on CPUs, NCCL where each worker has a GPU of its own), by `cuda-ipc` within a GPU that both share, or `auto`:
    shared memory where all workers are on one machine, else the folder if there is one, else Ray."""
    carrier_dir: str = ""
    """Folder that every machine sees, for the carrier `disk`."""
    bucket_mb: int = 256
    """Weights travel in buckets of this size, in MiB."""
    object_store_mb: int = 512
    """Memory for Ray's objects, in MiB, where this run starts the cluster. Rollouts do not go through it as a whole."""
    num_cpus: int = 0
    """CPUs that a cluster started here claims to have; 0 counts the machine's."""
    start_timeout_s: float = 300.0
    """Longest time for a worker to start and build its parts."""
    call_timeout_s: float = 3600.0
    """Longest time for one phase of a step on a worker; then the run fails and says who did not answer."""
    retries: int = 1
    """How often a call is repeated whose reward or rollout worker died or hung, on a new process: such a worker holds
    nothing that others do not have, and the noise is that of the sample. 0 ends the run. A train rank always does."""
    environment: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Environment variables of the workers."""


@dataclass
class WorkerStoreConfig(PartConfig):
    """Nothing to set: workers keep tensors in memory and hand them on through Ray's objects."""


def problems(config: RayConfig) -> Iterator[str]:
    """What is wrong with these settings, each one sentence with the key path first."""
    for key, value, allowed in (
        ("placement", config.placement, PLACEMENTS),
        ("reference", config.reference, REFERENCES),
        ("carrier", config.carrier, CARRIERS),
    ):
        if value not in allowed:
            yield f"launcher.{key}: {value!r} was asked for; it is one of {', '.join(allowed)}."
    for key, number, least in (
        ("train_ranks", config.train_ranks, 1),
        ("rollout_workers", config.rollout_workers, 1),
        ("reference_workers", config.reference_workers, 1),
        ("reward_workers", config.reward_workers, 1),
        ("cpus", config.cpus, 0),
        ("reward_cpus", config.reward_cpus, 0),
        ("reward_gpus", config.reward_gpus, 0),
        ("bucket_mb", config.bucket_mb, 1),
        ("object_store_mb", config.object_store_mb, 80),
        ("num_cpus", config.num_cpus, 0),
        ("retries", config.retries, 0),
    ):
        if number < least:
            yield f"launcher.{key}: {number} was asked for; it must be {least} or more."
    for key, seconds in (("start_timeout_s", config.start_timeout_s), ("call_timeout_s", config.call_timeout_s)):
        if seconds <= 0:
            yield f"launcher.{key}: {seconds} was asked for; it must be above 0."
    if config.placement == "colocate" and config.gpus > 1:
        yield f"launcher.gpus: {config.gpus:g} was asked for; with colocate a train rank and a rollout worker share 1."
    if config.carrier == "disk" and not config.carrier_dir:
        yield "launcher.carrier_dir: the carrier 'disk' needs a folder that every machine sees; name one."


def misplaced(config: RayConfig, *, device: str) -> Iterator[str]:
    """What is wrong with these settings on a device, `run.device`."""
    if config.carrier != "cuda-ipc":
        return
    if device == "cpu":
        yield (
            "launcher.carrier: 'cuda-ipc' was asked for; run.device is 'cpu', and there is no memory of a GPU to "
            "share. Use 'shared-memory'."
        )
    elif config.placement == "separate" and (config.gpus < 0 or config.gpus >= 1):
        yield (
            "launcher.carrier: 'cuda-ipc' was asked for; with 'separate' and launcher.gpus of 1 or more each worker "
            "has a GPU of its own. Use 'collective', or launcher.placement=colocate."
        )
