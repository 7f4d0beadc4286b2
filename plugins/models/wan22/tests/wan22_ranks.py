"""A rank that holds a shard of both experts, and rows of noise for one of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from unirl.models.wan22.config import Wan22Config
from unirl.models.wan22.model import build

SIGMAS = [[0.95, 0.9], [0.4, 0.3], [0.95, 0.3]]
"""Of the two rows: for the first expert, for the second, for both."""


def gradients(folder: Path, cases: list[list[float]], rows: list[int], *, is_sharded: bool) -> list[dict[str, Tensor]]:
    """Whole gradients of the mean over the two rows, for each case; this process computes some of them."""
    model = build(Wan22Config(path=str(folder)), device="cpu")
    module = model.trainable
    if is_sharded:
        for block in [part for part in module.modules() if type(part).__name__ == "WanTransformerBlock"]:
            fully_shard(block)
        fully_shard(module)
    generator = torch.Generator().manual_seed(0)
    x, embeds = torch.randn(2, 4, 2, 4, 4, generator=generator), torch.randn(2, 16, 32, generator=generator)
    result: list[dict[str, Tensor]] = []
    for sigmas in cases:
        module.zero_grad()
        velocity = model.velocity(x[rows], torch.tensor(sigmas)[rows], {"prompt_embeds": embeds[rows]})
        # FSDP2 divides by the number of ranks, which have one row each.
        (velocity.square().mean() * len(rows) / (1 if is_sharded else 2)).backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}
        result.append(whole)
    return result


def rank(number: int, folder: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    result = gradients(Path(folder), SIGMAS, [number], is_sharded=True)
    if number == 0:
        torch.save(result, f"{store}.pt")
    dist.destroy_process_group()
