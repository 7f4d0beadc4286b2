"""One rank of the four-rank test: `python fsdp2_four_ranks.py RANK STORE FOLDER`. Rank 0 leaves its findings in FOLDER."""

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_toy import SPEC, Clipped, ToyModel, gradients, make_backend, make_track
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings, MeshConfig
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

SPLIT = dataclasses.replace(SPEC, tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
FULL = {"trains": "full", "reference_copy": True, "max_grad_norm": 0.05}
CASES = {
    # Two copies in two shards each; the layer of LoRA rank 3 does not divide.
    "hsdp": {**FULL, "mesh": MeshConfig(shard=2)},
    "hsdp-lora": {"lora": LoraSettings(rank=3, alpha=6.0), "mesh": MeshConfig(shard=2)},
    "tensor": {**FULL, "mesh": MeshConfig(tensor=2)},
    "tensor-alone": {**FULL, "mesh": MeshConfig(tensor=4)},
    "tensor-hsdp": {**FULL, "mesh": MeshConfig(tensor=2, shard=1)},
}


def backend_of(case, *, alone=False):
    settings = {**CASES[case], **({"mesh": MeshConfig()} if alone else {})}
    model = ToyModel(spec=SPLIT)
    ema = AverageConfig(kind="constant", decay=0.5)
    return make_backend(model, train=TrainConfig(micro_batch_size=2), ema=ema, **settings)


def run(case, *, rank=0, world=1, folder=None):
    """What a rank finds that holds its share of eight rows; collective."""
    backend, _ = backend_of(case, alone=world == 1)
    tensor = 1 if world == 1 else CASES[case]["mesh"].tensor
    holders = world // tensor
    track = make_track(ToyModel())
    mine = track.select([row for row in range(8) if row % holders == rank // tensor])
    first = gradients(backend, mine, Clipped(to="reference"))
    backend.train([Job(track=mine, algorithm=Clipped(to="ema"))], progress=0.0)
    report = backend.train([Job(track=mine, algorithm=Clipped())], progress=0.0)
    if folder is not None:
        backend.save(folder)
    live = dict(backend.export_weights(kind="merged").tensors)
    backend.close()
    return {"gradients": first, "metrics": dict(report.metrics), "live": live}


def main():
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    result = {case: run(case, rank=rank, world=4, folder=folder / case) for case in CASES}
    if rank == 0:
        torch.save(result, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
