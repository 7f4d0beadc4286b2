"""Seconds of an AdamW step over LoRA adapters, laid out as in a backend: the loops of torch against the fused step.

    python benchmarks/optimizer_step.py [--tensors 384] [--rank 32] [--width 1536] [--repeats 7] [--device cpu]

Plain tensors, and DTensors on a mesh of one rank, as under FSDP. Minima; the ways of stepping take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WAYS: Mapping[str, Mapping[str, Any]] = {
    "torch's choice": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=384)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(args.device, (1,))
    for layout in ("plain", "DTensor"):

        def laid_out(tensor: Tensor, layout: str = layout) -> Tensor:
            return tensor if layout == "plain" else distribute_tensor(tensor, mesh, [Shard(0)])

        adams = {
            name: adam_of(args.tensors, (args.rank, args.width), laid_out, args.device, way)
            for name, way in WAYS.items()
        }
        best = dict.fromkeys(adams, float("inf"))
        for _ in range(args.repeats):
            for name, adam in adams.items():
                best[name] = min(best[name], seconds(adam, args.device))
        print(f"{layout:8} " + "   ".join(f"{name} {1e3 * best[name]:.1f} ms" for name in best))
    dist.destroy_process_group()


def adam_of(
    count: int, shape: tuple[int, int], laid_out: Callable[[Tensor], Tensor], device: str, way: Mapping[str, Any]
) -> torch.optim.AdamW:
    """An optimizer whose state is there: it has taken a step."""
    params = [nn.Parameter(laid_out(torch.randn(shape, device=device))) for _ in range(count)]
    for param in params:
        param.grad = laid_out(torch.randn(shape, device=device))
    adam = torch.optim.AdamW(params, lr=1e-4, **way)
    adam.step()
    return adam


def seconds(adam: torch.optim.AdamW, device: str) -> float:
    start = time.perf_counter()
    adam.step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
