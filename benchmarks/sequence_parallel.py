# torch.distributed and diffusers export names that pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Time and bytes of a rank where a group of ranks shares the tokens of each video, against the number of tokens.

    python benchmarks/sequence_parallel.py [--ranks 1 2 4] [--frames 4 8 16 32] [--odd-frames 33] [--repeats 3]

One forward and backward of a random Wan transformer (8 heads, width 192, 4 blocks) on gloo. Prints, by tokens and
ranks, the CPU seconds of the slowest rank (the minimum of the repeats) and the most bytes that a rank keeps for its
backward pass. Ranks beyond the cores share them, so CPU seconds, not wall time, are what a rank would take alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from unirl.numerics.diffusion.sequence_parallel import split_transformer
from unirl.numerics.diffusion.wan import WanModel

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
    print(f"{'tokens':>8} {'ranks':>6} {'seconds':>9} {'of one':>7} {'MB kept':>9} {'of one':>7}")
    sizes = [(count, *SIZE) for count in options.frames] + [(count, *ODD_SIZE) for count in options.odd_frames]
    results: dict[tuple[tuple[int, int, int], int], list[float]] = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank, (ranks, folder, sizes, options.repeats), nprocs=ranks)
            found = torch.stack([torch.load(Path(folder) / f"{own}.pt") for own in range(ranks)])
        for size, largest in zip(sizes, found.amax(0).tolist(), strict=True):
            results[size, ranks] = largest
    for size in sizes:
        tokens = size[0] * (size[1] // 2) * (size[2] // 2)
        first = results[size, options.ranks[0]]
        for ranks in options.ranks:
            seconds, kept = results[size, ranks]
            print(
                f"{tokens:8} {ranks:6} {seconds:9.3f} {seconds / first[0]:7.2f} "
                f"{kept / 1e6:9.1f} {kept / first[1]:7.2f}"
            )


def rank(own: int, ranks: int, folder: str, sizes: list[tuple[int, int, int]], repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=own, world_size=ranks)
    torch.manual_seed(0)
    net = WanTransformer3DModel(**SETTINGS)
    if ranks > 1:
        split_transformer(net, init_device_mesh("cpu", (ranks,)), WanModel.sequence)
    results = []
    for size in sizes:
        x, text = torch.randn(1, 16, *size), torch.randn(1, 64, 64)

        def velocity(x: Tensor = x, text: Tensor = text) -> Tensor:
            return net(hidden_states=x, timestep=torch.full((1,), 500.0), encoder_hidden_states=text)[0]

        seconds = []
        for _ in range(repeats):
            dist.barrier()
            start = time.process_time()
            velocity().square().mean().backward()
            seconds.append(time.process_time() - start)
        results.append([min(seconds), bytes_kept(velocity, net)])
    torch.save(torch.tensor(results, dtype=torch.float64), f"{folder}/{own}.pt")
    dist.barrier()
    dist.destroy_process_group()


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
