# torch.distributed and diffusers export names that pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Time and bytes of a rank where a group of ranks shares the tokens of each video, against the number of tokens.

    python benchmarks/sequence_parallel.py [--ranks 1 2 4] [--frames 4 8 16 32] [--odd-frames 33] [--repeats 3]

One forward and backward of a random Wan transformer (8 heads, width 192, 4 blocks) on gloo. Prints, by tokens and
ranks, the CPU seconds of the slowest rank (the minimum of the repeats, in which numbers of ranks take turns), those
inside the exchanges of tokens for heads, and the most bytes that a rank keeps for its backward pass. Ranks beyond the
cores share them, so CPU seconds, not wall time, are what a rank would take alone.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from unirl.model_host.diffusion.sequence_parallel import split_transformer
from unirl.models.wan.model import WanModel

SIZE, ODD_SIZE = (16, 16), (14, 18)
"""Latents of a frame: 8 by 8 tokens, or 7 by 9, of which no even number of ranks has equal parts."""
SETTINGS = {
    "patch_size": (1, 2, 2),
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 24,
    "num_attention_heads": 8,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 768,
    "rope_max_seq_len": 128,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, nargs="+", default=[4, 8, 16, 32], help="latent frames of 64 tokens")
    parser.add_argument("--odd-frames", type=int, nargs="*", default=[33], help="latent frames of 63 tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes = [(count, *SIZE) for count in options.frames] + [(count, *ODD_SIZE) for count in options.odd_frames]
    largest = max(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (options.ranks, folder, sizes, options.repeats), nprocs=largest)
        # Those that a rank took no part in are 0.
        results = torch.stack([torch.load(Path(folder) / f"{own}.pt") for own in range(largest)]).amax(0).tolist()
    print(f"{'tokens':>8} {'ranks':>6} {'seconds':>9} {'of first':>8} {'exchange':>9} {'MB kept':>9} {'of first':>8}")
    for size, of_size in zip(sizes, results, strict=True):
        tokens = size[0] * (size[1] // 2) * (size[2] // 2)
        for ranks, (seconds, exchange, kept) in zip(options.ranks, of_size, strict=True):
            print(
                f"{tokens:8} {ranks:6} {seconds:9.3f} {seconds / of_size[0][0]:8.2f} {exchange:9.4f} "
                f"{kept / 1e6:9.1f} {kept / of_size[0][2]:8.2f}"
            )


def rank(own: int, groups: list[int], folder: str, sizes: list[tuple[int, int, int]], repeats: int) -> None:
    torch.set_num_threads(1)
    world = max(groups)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=own, world_size=world)
    exchange = Timed(dist.all_to_all_single)
    dist.all_to_all_single = exchange
    nets = {ranks: network(ranks) for ranks in groups}
    results = torch.zeros(len(sizes), len(groups), 3, dtype=torch.float64)
    for place, size in enumerate(sizes):
        x, text = torch.randn(1, 16, *size), torch.randn(1, 64, 64)

        def velocity(net: nn.Module, x: Tensor = x, text: Tensor = text) -> Tensor:
            return net(hidden_states=x, timestep=torch.full((1,), 500.0), encoder_hidden_states=text)[0]

        best = {ranks: (float("inf"), 0.0) for ranks in groups}
        for repeat in range(repeats):
            for ranks in groups if repeat % 2 else reversed(groups):
                dist.barrier()
                if own < ranks:
                    exchange.seconds, start = 0.0, time.process_time()
                    velocity(nets[ranks]).square().mean().backward()
                    best[ranks] = min(best[ranks], (time.process_time() - start, exchange.seconds))
        for column, ranks in enumerate(groups):
            dist.barrier()
            if own < ranks:
                net = nets[ranks]
                results[place, column] = torch.tensor([*best[ranks], bytes_kept(functools.partial(velocity, net), net)])
    torch.save(results, f"{folder}/{own}.pt")
    dist.barrier()
    dist.destroy_process_group()


def network(ranks: int) -> nn.Module:
    """The same on all, split over the first of them. Collective."""
    torch.manual_seed(0)
    net = WanTransformer3DModel(**SETTINGS)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    if ranks > 1 and dist.get_rank() < ranks:
        split_transformer(net, mesh, WanModel.sequence)
    return net


class Timed:
    """A function, and the CPU seconds inside it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = self.function(*args, **kwargs)
        self.seconds += time.process_time() - start
        return result


def bytes_kept(velocity: Callable[[], Tensor], net: nn.Module) -> int:
    """Bytes that autograd keeps for one backward pass, each memory once, without those of the parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity()
    return sum(found.values())


if __name__ == "__main__":
    main()
