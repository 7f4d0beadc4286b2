"""Two processes that train together: started by `train_on_two_ranks`, they meet through a file, and are ended for
certain."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from unirl.core.roles import Algorithm, Backend, Policy
from unirl.core.specs.config import PartConfig, TrainConfig
from unirl.core.types.track import Track

from .forks import Fork, wait_for
from .model import WorkbenchModel
from .surrogate import Surrogate
from .trainee import Trainee, Training, largest_gap

__all__ = ["Found", "Job", "train_here", "train_on_two_ranks"]

NUM_RANKS = 2
DEADLINE_S = 240
"""Seconds on two idle cores, and many times that on busy ones."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One backend to build and train. Plain data, sent to the ranks as it is."""

    build: str
    """Of the backend's spec."""
    config: PartConfig
    training: Training
    policies: tuple[Policy, ...]
    train: TrainConfig
    tracks: tuple[tuple[Track, ...], ...]
    """Of every rank, one track for each call of `train`."""
    algorithm: Callable[[], Algorithm] = Surrogate
    seed: int = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank sees after a job."""

    tensors: Mapping[str, Tensor]
    """`Trainee.everything`."""
    metrics: Mapping[str, float]
    """Of the last call."""
    version: int
    change: float
    """The largest change of what trains."""


def train_here(job: Job, build: Callable[..., Backend], *, rank: int = 0) -> Found:
    """Do a job in this process, as one of the ranks of its process group if there is one."""
    model = WorkbenchModel()
    plain = {name: param.detach().clone() for name, param in model.net.named_parameters()}
    backend = build(job.config, model=model, train=job.train, steps=100, seed=job.seed)
    trainee = Trainee(backend=backend, model=model, training=job.training, policies=job.policies, plain=plain)
    try:
        before = trainee.trained()
        reports = [trainee.train(track, job.algorithm()) for track in job.tracks[rank]]
        return Found(
            tensors=trainee.everything(),
            metrics=dict(reports[-1].only),
            version=backend.version,
            change=largest_gap(trainee.trained(), before),
        )
    finally:
        backend.close()


def train_on_two_ranks(jobs: Sequence[Job], folder: Path) -> list[list[Found]]:
    """Do the jobs in two processes. folder: empty. Returns what each rank found, job by job.

    Raises AssertionError with the end of its output when a rank fails, or when they are not done in time.
    """
    ranks: dict[str, Fork] = {}
    try:
        for rank in range(NUM_RANKS):
            log = folder / f"rank-{rank}.log"
            ranks[f"rank {rank} of {NUM_RANKS}"] = Fork(_train, folder, rank, list(jobs), log=log)
        wait_for(ranks, within_s=DEADLINE_S)
    finally:
        for fork in ranks.values():
            fork.kill()
    return [pickle.loads((folder / f"found-{rank}.pkl").read_bytes()) for rank in range(NUM_RANKS)]


def _train(folder: Path, rank: int, jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "store"), NUM_RANKS),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    result = [train_here(job, pkgutil.resolve_name(job.build), rank=rank) for job in jobs]
    (folder / f"found-{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
