# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from unirl.numerics.diffusion.wan_miniature import wan_components, wan_image_encoder, wan_transformer

__all__ = ["write", "write_i2v"]


def write(
    folder: Path,
    *,
    seed: int,
    scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler | None = None,
) -> None:
    """Write a `WanPipeline` of about 0.4 M random parameters; same seed, same bytes.

    scheduler: another one than Wan 2.1's, whose shift is that for 480p.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = wan_transformer()
        components = wan_components(flow_shift=3.0)
    if scheduler is not None:
        components["scheduler"] = scheduler
    WanPipeline(transformer=transformer, **components).save_pretrained(folder)


def write_i2v(folder: Path, *, seed: int, image_encoder: bool = True) -> None:
    """The same for `WanImageToVideoPipeline`, with the image encoder of the published checkpoints or without one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = wan_transformer(from_frame=True, image_features=image_encoder)
        components = wan_components(flow_shift=3.0) | (wan_image_encoder() if image_encoder else {})
    WanImageToVideoPipeline(transformer=transformer, **components).save_pretrained(folder)
