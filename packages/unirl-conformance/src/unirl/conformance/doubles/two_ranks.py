"""Training on two ranks: two processes that rendezvous through a file."""

from __future__ import annotations

import pickle
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes
from unirl.core.roles import Algorithm, Backend, Policy
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.track import Track

from .ppo import PPO
from .processes import forkserver
from .tiny_denoiser import TinyDenoiser
from .trainer import Trainer, Training, largest_gap

__all__ = ["Job", "Result", "train_here", "train_on_two_ranks"]

NUM_RANKS = 2
DEADLINE_S = 240
"""Seconds on two idle cores, and many times that on busy ones."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One backend to build and train. Plain data, sent to the ranks as it is."""

    build: str
    """`build` of the backend's spec."""
    config: PartConfig
    training: Training
    policies: tuple[Policy, ...]
    train: TrainConfig
    tracks: tuple[tuple[Track, ...], ...]
    """Tracks of every rank, one for each call of `train`."""
    algorithm: Callable[[], Algorithm] = PPO
    seed: int = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """State of a rank after a job."""

    tensors: Mapping[str, Tensor]
    """`Trainer.everything`."""
    metrics: Mapping[str, float]
    """Metrics of the last call."""
    version: int
    change: float
    """The largest change of a trained weight."""


def train_here(job: Job, build: Callable[..., Backend], *, rank: int = 0) -> Result:
    """Do a job in this process, as one of the ranks of its process group if there is one."""
    model = TinyDenoiser()
    plain = {name: param.detach().clone() for name, param in model.net.named_parameters()}
    backend = build(job.config, model=model, train=job.train, steps=100, seed=job.seed)
    trainer = Trainer(backend=backend, model=model, training=job.training, policies=job.policies, plain=plain)
    try:
        before = trainer.trained()
        reports = [trainer.train(track, job.algorithm()) for track in job.tracks[rank]]
        return Result(
            tensors=trainer.everything(),
            metrics=dict(reports[-1].only),
            version=backend.version,
            change=largest_gap(trainer.trained(), before),
        )
    finally:
        backend.close()


def train_on_two_ranks(jobs: Sequence[Job], folder: Path, *, deadline_s: float = DEADLINE_S) -> list[list[Result]]:
    """Do the jobs in two processes. folder: empty. Returns the results of each rank, job by job.

    Raises `torch.multiprocessing.ProcessRaisedException` with the traceback of the rank that failed first, and
    AssertionError when they do not finish in time.
    """
    forkserver()
    arguments = (folder, pickle.dumps(jobs))
    ranks: Any = start_processes(_train, arguments, nprocs=NUM_RANKS, join=False, start_method="forkserver")
    end = time.monotonic() + deadline_s
    try:
        while not ranks.join(timeout=end - time.monotonic()):
            running = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
            assert time.monotonic() < end, f"ranks {running} of {NUM_RANKS} did not finish within {deadline_s:g} s"
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"results-{rank}.pkl").read_bytes()) for rank in range(NUM_RANKS)]


def _train(rank: int, folder: Path, jobs: bytes) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "store"), NUM_RANKS),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    results = [train_here(job, pkgutil.resolve_name(job.build), rank=rank) for job in pickle.loads(jobs)]
    (folder / f"results-{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
