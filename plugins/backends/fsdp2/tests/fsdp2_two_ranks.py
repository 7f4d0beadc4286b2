"""One rank of the two-rank test: `python fsdp2_two_ranks.py RANK STORE FOLDER`. Rank 0 leaves its findings in FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_toy import Clipped, ToyModel, gradients, make_backend, make_track
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings, MeshConfig
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

CASES = {
    # Rank 3 does not divide by two: the ranks hold shards of different size.
    "lora": {"lora": LoraSettings(rank=3, alpha=6.0)},
    # Every rank has the whole base.
    "lora-replicated": {"lora": LoraSettings(rank=3, alpha=6.0), "mesh": MeshConfig(shard=1)},
    "full": {"trains": "full", "reference_copy": True, "max_grad_norm": 0.05},
    # As "lora" and "full", with what a forward gathers kept.
    "lora-gathered": {"lora": LoraSettings(rank=3, alpha=6.0), "reshard_after_forward": "never"},
    "full-gathered": {
        "trains": "full",
        "reference_copy": True,
        "max_grad_norm": 0.05,
        "reshard_after_forward": "never",
    },
    "each-micro": {"trains": "full", "reference_copy": True, "defer_gradient_sync": False},
}
ROWS = ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 4, 5], [3, 6, 7]), ([0, 1, 2, 3, 4, 5, 6, 7], [])
"""Rows of each rank: equal, unequal, and all on one rank."""


def backend_of(case):
    return make_backend(
        train=TrainConfig(micro_batch_size=2), ema=AverageConfig(kind="constant", decay=0.5), **CASES[case]
    )


def run(case, rows, *, folder=None):
    """Gradients, metrics and weights of a rank with these rows; collective."""
    backend, model = backend_of(case)
    track = make_track(ToyModel())
    mine = track.select(rows) if rows else track.select([0]).padded(2).select([1])
    if not rows:
        assert mine.num_rows == 1 and mine.sample_weights.tolist() == [0.0]
    first = gradients(backend, mine, Clipped(to="reference"))
    gathers = _gathers(model) if isinstance(model.net, FSDPModule) else ()
    backend.train([Job(track=mine, algorithm=Clipped(to="ema"))], progress=0.0)
    report = backend.train([Job(track=mine, algorithm=Clipped())], progress=0.0)
    with backend.policy("ema"):
        sent = dict(backend.export_weights(kind="merged", policy="ema").tensors)
    if folder is not None:
        backend.save(folder)
    live = dict(backend.export_weights(kind="merged").tensors)
    backend.close()
    wrapped = float(isinstance(model.net, FSDPModule))
    return {
        "gradients": first,
        "metrics": dict(report.only),
        "ema": sent,
        "live": live,
        "wrapped": wrapped,
        "gathers": gathers,
    }


def _gathers(model):
    """Collective gathers of a forward after another without gradient, and of a forward and its backward pass."""
    counts = []
    latents, text = torch.ones(2, 2, 2, 2), {"text": torch.ones(2, 3)}
    for context in (torch.no_grad(), torch.no_grad(), torch.enable_grad()):
        with CommDebugMode() as mode, context:
            result = model.velocity(latents, torch.full((2,), 0.5), text)
            if result.requires_grad:
                result.square().sum().backward()
        counts.append(sum(number for name, number in mode.get_comm_counts().items() if "gather" in str(name)))
    for param in model.net.parameters():
        param.grad = None
    return tuple(counts)


def main():
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    result = {}
    for case in CASES:
        for number, rows in enumerate(ROWS):
            result[case, number] = run(case, rows[rank], folder=folder / case if number == 0 else None)
    if rank == 0:
        torch.save(result, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
