"""Seconds that a run waits for a checkpoint, and those until it is complete: `run.save_async` against a save.

    python benchmarks/checkpoint_stall.py [--elements 1000000 8000000 32000000] [--width 1000] [--repeats 5] [--sharded]

A backend of `fsdp2` that trains all weights, of width x width each, and has Adam's moments; its checkpoint is written,
hashed and renamed, and the one before it removed, as in a run. Nothing computes meanwhile. The two ways take turns;
minima, and the first copy, for which memory is allocated.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from unirl.backends.fsdp2.backend import Fsdp2Backend, build
from unirl.backends.fsdp2.config import Fsdp2Config
from unirl.core.roles import Model
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.spec import ModelSpec
from unirl.loop.checkpoints import Checkpoints
from unirl.train_host.checkpoint import read_keys

MIB = 2**20


class Layers(Model):
    """A model that is only saved."""

    spec = ModelSpec(name="layers", summary="", build="", config="", tracks={"image": "latent"}, trainable="net")

    def __init__(self, elements: int, width: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        count = max(1, elements // width**2)
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False, device=self.device) for _ in range(count)))

    @property
    def trainable(self) -> nn.Module:
        return self.net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[1_000_000, 8_000_000, 32_000_000])
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--sharded", action="store_true", help="wrapped by FSDP, so that its tensors are DTensors")
    args = parser.parse_args()
    print("| checkpoint | tensors | save: stall and total | save_async: stall | total | first copy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for elements in args.elements:
        with TemporaryDirectory(dir=args.folder) as folder:
            backend = trained(elements, args.width, sharded=args.sharded)
            print(row(backend, Path(folder), repeats=args.repeats), flush=True)


def row(backend: Fsdp2Backend, folder: Path, *, repeats: int) -> str:
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    times: dict[str, list[tuple[float, float]]] = {"sync": [], "async": []}
    for number in range(repeats):
        times["sync"].append(timed(lambda: backend.save, checkpoints, step=2 * number))
        times["async"].append(timed(backend.snapshot, checkpoints, step=2 * number + 1))
    tensors = len(read_keys(checkpoints.load().backend_folder("")))
    size = sum(file.stat().st_size for file in checkpoints.load().folder.rglob("*") if file.is_file())
    backend.close()
    (_, total), (stall, beside) = (tuple(map(min, zip(*times[way], strict=True))) for way in ("sync", "async"))
    return (
        f"| {size / MIB:.0f} MiB | {tensors} | {total:.3f} s | {stall:.4f} s ({stall / total:.1%}) | {beside:.3f} s "
        f"| {times['async'][0][0]:.4f} s |"
    )


def timed(started: Callable[[], Callable[[Path], None]], checkpoints: Checkpoints, *, step: int) -> tuple[float, float]:
    """Seconds until training could go on if the write is beside it, and until the checkpoint is complete."""
    began = time.perf_counter()
    write = started()
    stall = time.perf_counter() - began
    thread = threading.Thread(target=lambda: checkpoints.save(step, write=write, state={}))
    thread.start()
    thread.join()
    return stall, time.perf_counter() - began


def trained(elements: int, width: int, *, sharded: bool) -> Fsdp2Backend:
    """A backend that has taken an optimizer step."""
    config = Fsdp2Config(trains="full", shard="always" if sharded else "auto")
    backend = build(config, model=Layers(elements, width), train=TrainConfig(), steps=2)
    optimizer: Any = backend._optimizer  # pyright: ignore[reportPrivateUsage] - a step without rollouts
    params: dict[str, Tensor] = optimizer.params
    for param in params.values():
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return backend


if __name__ == "__main__":
    main()
