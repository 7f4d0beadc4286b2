"""One rank of the test of scale: `python fsdp2_scale_ranks.py RANK STORE FOLDER`. Leaves what it found in FOLDER."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tensor_meter import Meter
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import CriticConfig, Fsdp2Config, LoraSettings, MeshConfig
from unirl.core.specs.config import TrainConfig
from unirl.core.types.weights import tensor_digest
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_model
from unirl.numerics.tokens.batches import pad_batch
from unirl.train_host.sharding import local


def run(folder, *, lazy, trains, dtype, mesh=None, critic=None):
    """Peak memory of a rank that builds the model and exports its weights, and digests of its shards."""
    with Meter() as built:
        model = build_model(Qwen3Config(path=str(folder / "checkpoint"), dtype=dtype), device="cpu", lazy=lazy)
        built.note(model.trainable.parameters())
        config = Fsdp2Config(
            trains=trains, lora=LoraSettings(rank=4), mesh=MeshConfig(**mesh or {}), critic=CriticConfig(lr=critic)
        )
        backend = build(config, model=model, train=TrainConfig(), steps=1, seed=3)
    tensors = {**model.trainable.state_dict(keep_vars=True), **dict(model.trainable.named_buffers())}
    if backend._critic is not None:
        tensors |= {f"critic.{name}": tensor for name, tensor in backend._critic.net.state_dict(keep_vars=True).items()}
    shards = {name: tensor_digest(name, local(tensor)) for name, tensor in tensors.items()}
    kind = "full" if trains == "full" else "merged"
    with Meter() as sent:
        sent.note(map(local, model.trainable.parameters()))
        held = sent.live
        update = backend.export_weights(kind=kind)
        largest = 0
        for tensor in update.tensors.values():
            largest = max(largest, tensor.nbytes)
            del tensor
    result = {
        "built": built.peak,
        "shards": shards,
        "tied": model.trainable.lm_head.weight is model.trainable.model.embed_tokens.weight,
        "checksum": update.checksum,
        "sent": sent.peak - held,
        "largest": largest,
    }
    backend.close()
    return result


def teach(folder, *, lazy):
    """Peak memory of a rank that holds the model as a teacher of a small one, and its scores of some tokens."""
    student = build_model(Qwen3Config(path=str(folder / "student")), device="cpu", lazy=True)
    backend = build(Fsdp2Config(trains="full"), model=student, train=TrainConfig(), steps=1, seed=3)
    with Meter() as built:
        teacher = build_model(Qwen3Config(path=str(folder / "checkpoint")), device="cpu", lazy=lazy)
        teacher.trainable.requires_grad_(False)
        if lazy:
            backend.hold_frozen(teacher)
        built.note(map(local, teacher.trainable.parameters()))
    # Each rank scores different tokens.
    tokens = torch.arange(8 * (1 + dist.get_rank()), 8 * (2 + dist.get_rank()))
    batch = pad_batch([tokens[:3]], [tokens[3:]], pad_token=0)
    with torch.no_grad():
        scores = teacher.score(batch, temperature=1.0)[0]
    backend.close()
    return {"built": built.peak, "held": built.live, "scores": scores.tolist()}


def main():
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    ranks = job["ranks"]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    found = [run(folder, **case) for case in job["cases"]]
    found += [teach(folder, lazy=lazy) for lazy in (True, False) if job["teaches"]]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
