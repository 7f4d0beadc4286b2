"""A rank that shares the tokens of videos from a first frame with another one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan21.config import Wan21I2VConfig
from unirl.models.wan21.i2v import build
from wan_first_frames import frames_of, initial


def computed(folder: Path, frames: Path, *, is_split: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A velocity of two rows, and the gradients of its mean square, of this rank's tokens where they are split."""
    model = build(Wan21I2VConfig(path=str(folder)), device="cpu")
    if is_split:
        model.split_sequence(init_device_mesh("cpu", (2,)))
    sampling = LatentSamplingConfig(frames=5, height=32, width=64, max_sequence_length=512)
    conditions = model.encode(frames_of(frames, [1, 2]), sampling=sampling)
    velocity = model.velocity(initial(model, sampling), torch.tensor([0.7, 0.2]), conditions)
    velocity.square().mean().backward()
    return velocity.detach(), {name: p.grad for name, p in model.trainable.named_parameters() if p.grad is not None}


def rank(number: int, folder: str, frames: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    velocity, gradients = computed(Path(folder), Path(frames), is_split=True)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    if number == 0:
        torch.save((velocity, gradients), f"{store}.pt")
    dist.destroy_process_group()
