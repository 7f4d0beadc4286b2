"""The toy denoiser in the fsdp2 backend."""

from __future__ import annotations

from toy_denoiser import (
    SDE_STEPS,
    SIGMAS,
    SPEC,
    Clipped,
    ToyBlock,
    ToyModel,
    ToyNet,
    draw_adapters,
    gradients,
    make_track,
)
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import Fsdp2Config, LoraSettings
from unirl.core.specs.config import TrainConfig

__all__ = [
    "SDE_STEPS", "SIGMAS", "SPEC", "Clipped", "ToyBlock", "ToyModel", "ToyNet", "gradients", "make_backend", "make_track",
    "settings",
]  # fmt: skip


def settings(**changes) -> Fsdp2Config:
    """Small adapters with a B that is not 0, so that every adapter weight has a gradient from the first step."""
    base = {"trains": "lora", "lora": LoraSettings(rank=4, alpha=6.0), "lr": 1e-2, "max_grad_norm": None}
    return Fsdp2Config(**{**base, **changes})


def make_backend(model=None, *, train: TrainConfig | None = None, steps: int = 10, **changes):
    """(backend, model). The adapters' B is drawn instead of 0."""
    model = model or ToyModel()
    backend = build(settings(**changes), model=model, train=train or TrainConfig(), steps=steps, seed=3)
    draw_adapters(backend)
    return backend, model
