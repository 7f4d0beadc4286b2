"""One of two ranks: it shares the tokens of videos from a first frame, or holds a shard of both experts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from unirl.core.types.sampling import LatentSamplingConfig
from wan_models import built
from wan_pipelines import frames_of, initial

SIGMAS = [[0.95, 0.9], [0.4, 0.3], [0.95, 0.3]]
"""Noise of the two rows: for the first expert, for the second, for both."""


def from_frame(folder: Path, frames: Path, *, is_split: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A velocity of two rows, and the gradients of its mean square, of this rank's tokens where they are split."""
    model = built("wan21-i2v", folder)
    # Gradients of keys are small differences of large sums: in fp32 their rounding depends on the CPU.
    model.dtype = torch.float64
    model.trainable.double()
    if is_split:
        model.split_sequence(init_device_mesh("cpu", (2,)))
    sampling = LatentSamplingConfig(frames=5, height=32, width=64, max_sequence_length=512)
    conditions = model.encode(frames_of(frames, [1, 2]), sampling=sampling)
    velocity = model.velocity(initial(model, sampling), torch.tensor([0.7, 0.2]), conditions)
    velocity.square().mean().backward()
    return velocity.detach(), {name: p.grad for name, p in model.trainable.named_parameters() if p.grad is not None}


def of_experts(folder: Path, rows: list[int], *, is_sharded: bool) -> list[dict[str, Tensor]]:
    """Whole gradients of the mean over the two rows, for each of SIGMAS; this process computes some of them."""
    module = (model := built("wan22", folder)).trainable
    if is_sharded:
        for block in [part for part in module.modules() if type(part).__name__ == "WanTransformerBlock"]:
            fully_shard(block)
        fully_shard(module)
    generator = torch.Generator().manual_seed(0)
    x, embeds = torch.randn(2, 4, 2, 4, 4, generator=generator), torch.randn(2, 16, 32, generator=generator)
    result: list[dict[str, Tensor]] = []
    for sigmas in SIGMAS:
        module.zero_grad()
        velocity = model.velocity(x[rows], torch.tensor(sigmas)[rows], {"prompt_embeds": embeds[rows]})
        # FSDP2 divides by the number of ranks, which have one row each.
        (velocity.square().mean() * len(rows) / (1 if is_sharded else 2)).backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        result.append({name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()})
    return result


def split_rank(number: int, folder: Path, frames: Path, store: str) -> None:
    def computed() -> Any:
        # Its own: the other rank writes the same frames at this moment.
        (own := frames / f"rank-{number}").mkdir()
        velocity, gradients = from_frame(folder, own, is_split=True)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        return velocity, gradients

    _rank(number, store, computed)


def sharded_rank(number: int, folder: Path, store: str) -> None:
    _rank(number, store, lambda: of_experts(folder, [number], is_sharded=True))


def _rank(number: int, store: str, computed: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    result = computed()
    if number == 0:
        torch.save(result, f"{store}.pt")
    dist.destroy_process_group()
