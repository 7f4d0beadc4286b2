"""A transport in three processes of a run: the driver's, which workers join, and two workers."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.roles import TransportCounts

from ..workbench.forks import Forks
from ..workbench.transport_process import Setup, TransportProcess, TransportProcesses
from .base import Bench

__all__ = ["Run", "TransportBench", "tensors"]

WORKERS = ("maker", "taker")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The processes of a run, by name: each a call of its transport."""

    name: str
    """Also the mark of every process of the run."""
    driver: TransportProcess
    maker: TransportProcess
    taker: TransportProcess
    start_s: float
    """What starting them took."""

    @property
    def all(self) -> tuple[TransportProcess, ...]:
        return (self.maker, self.taker, self.driver)

    def keep(self, given: Sequence[Tensor]) -> list[Any]:
        return self.maker("keep", list(given))

    def counts(self) -> tuple[TransportCounts, TransportCounts]:
        """Of the maker and of the taker."""
        return self.maker("counts"), self.taker("counts")


@dataclass(frozen=True, kw_only=True)
class TransportBench(Bench):
    def shared_run(self) -> Run:
        """A run that other claims use as well, in which nothing is kept at first."""
        run = self.workshop.entered(f"transport {self.subject.id}", self.run)
        run.maker("drop")
        return run

    @contextmanager
    def run(self) -> Iterator[Run]:
        """A run with the driver's transport and those of two workers, all ended at the end."""
        found = self.subject.found("transport")
        # Not below the folder of the claim: the path of a socket has room for a hundred letters.
        with tempfile.TemporaryDirectory(prefix="unirl-") as short, ExitStack() as stack:
            began, name = time.monotonic(), f"trial-{secrets.token_hex(4)}"
            forks = self.workshop.entered("forks", Forks)
            names = (*WORKERS, "driver")
            processes = stack.enter_context(TransportProcesses(names, folder=Path(short), mark=name, forks=forks))
            setup = Setup(build=found.spec.build, config=self.workshop.config(found), run=name)
            driver = processes.start("driver", setup)
            joined = Setup(build=setup.build, config=setup.config, run=name, address=driver("address"))
            maker, taker = (processes.start(worker, joined) for worker in WORKERS)
            yield Run(name=name, driver=driver, maker=maker, taker=taker, start_s=time.monotonic() - began)


def tensors() -> list[Tensor]:
    """Six rows each, of all sizes and dtypes that rollouts have, some with values that only bits tell apart."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(6, 3, 4, 5, generator=generator)
    latents[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return [
        latents,
        torch.randn(6, 33, generator=generator).bfloat16(),
        torch.randint(-(2**40), 2**40, (6, 7), generator=generator),
        torch.rand(6, 9, generator=generator) > 0.5,
        torch.randn(6, generator=generator, dtype=torch.float64),
        # A view of every second column: not contiguous.
        torch.randn(6, 16, generator=generator)[:, ::2],
    ]
