"""One rank of the four-rank test: `python fsdp2_four_ranks.py RANK STORE FOLDER`. Rank 0 leaves its findings in FOLDER."""

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp2_toy import SPEC, Clipped, ToyModel, gradients, make_backend, make_track
from unirl.backends.fsdp2.config import AverageConfig, Fsdp2Config, LoraSettings, MeshConfig
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.models.wan21.config import Wan21Config
from unirl.models.wan21.model import build as build_video

SPLIT = dataclasses.replace(SPEC, tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
FULL = {"trains": "full", "reference_copy": True, "max_grad_norm": 0.05}
CASES = {
    # Two copies in two shards each; the layer of LoRA rank 3 does not divide.
    "hsdp": {**FULL, "mesh": MeshConfig(shard=2)},
    "hsdp-lora": {"lora": LoraSettings(rank=3, alpha=6.0), "mesh": MeshConfig(shard=2)},
    "tensor": {**FULL, "mesh": MeshConfig(tensor=2)},
    "tensor-alone": {**FULL, "mesh": MeshConfig(tensor=4)},
    "tensor-hsdp": {**FULL, "mesh": MeshConfig(tensor=2, shard=1)},
    # Two pairs of ranks with different rows; the second time with a copy of the weights for each pair.
    "sequence": {**FULL, "mesh": MeshConfig(sequence=2)},
    "sequence-lora": {"lora": LoraSettings(rank=3, alpha=6.0), "mesh": MeshConfig(sequence=2, shard=2)},
}


def video_model(folder):
    """The tiny Wan 2.1: videos of 8 tokens, two attention heads. Its transformer alone is used."""
    model = build_video(Wan21Config(path=str(folder / "wan21")), device="cpu", serves=frozenset())
    model.net = model.transformer
    return model


def video_track(model):
    """Eight rows, sampled with the model as it is."""
    generator = torch.Generator().manual_seed(4)
    width = model.transformer.config.text_dim
    return make_track(
        model, shape=(4, 2, 4, 4), texts={"prompt_embeds": torch.randn(2, 16, width, generator=generator)}
    )


def backend_of(case, folder, *, alone=False):
    settings = {**CASES[case], **({"mesh": MeshConfig()} if alone else {})}
    model = video_model(folder) if "sequence" in case else ToyModel(spec=SPLIT)
    ema = AverageConfig(kind="constant", decay=0.5)
    return make_backend(model, train=TrainConfig(micro_batch_size=2), ema=ema, **settings)


def run(case, folder, *, rank=0, world=1):
    """What a rank finds that holds its share of eight rows; collective."""
    backend, model = backend_of(case, folder, alone=world == 1)
    copies = 1 if world == 1 else Fsdp2Config(**CASES[case]).copies
    holders = world // copies
    # Videos are sampled by the ranks that share their tokens.
    track = video_track(model) if "sequence" in case else make_track(ToyModel())
    sampled = track.latent.latents
    mine = track.select([row for row in range(8) if row % holders == rank // copies])
    first = gradients(backend, mine, Clipped(to="reference"))
    backend.train([Job(track=mine, algorithm=Clipped(to="ema"))], progress=0.0)
    report = backend.train([Job(track=mine, algorithm=Clipped())], progress=0.0)
    if world > 1:
        backend.save(folder / case)
    live = dict(backend.export_weights(kind="merged").tensors)
    backend.close()
    return {"sampled": sampled, "gradients": first, "metrics": dict(report.metrics), "live": live}


def refusals(folder, rank):
    """What ranks of one sequence say that were given different rows, and a sequence that they cannot share evenly."""
    backend, model = backend_of("sequence", folder)
    track = video_track(model)
    said = {}
    # As a launcher would that counts all ranks as data-parallel ones.
    with pytest.raises(RunFailed) as refused:
        backend.train([Job(track=track.select([rank, rank + 4]), algorithm=Clipped())], progress=0.0)
    said["rows"] = str(refused.value)
    with pytest.raises(RecipeError) as refused:
        model.velocity(torch.zeros(1, 4, 1, 2, 6), torch.ones(1), {"prompt_embeds": torch.zeros(1, 16, 32)})
    said["tokens"] = str(refused.value)
    backend.close()
    with pytest.raises(RecipeError) as refused:
        make_backend(video_model(folder), trains="full", mesh=MeshConfig(sequence=4))
    said["heads"] = str(refused.value)
    return said


def main():
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    result = {case: run(case, folder, rank=rank, world=4) for case in CASES}
    result["refusals"] = refusals(folder, rank)
    if rank == 0:
        torch.save(result, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
