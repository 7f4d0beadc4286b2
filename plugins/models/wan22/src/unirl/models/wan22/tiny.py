# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from unirl.numerics.diffusion.wan_miniature import wan_components, wan_transformer

__all__ = ["write", "write_i2v"]


def write(folder: Path, *, seed: int, boundary: float | None = 0.875) -> None:
    """Write a `WanPipeline` of two experts, with about 0.5 M random parameters; same seed, same bytes.

    boundary: the sigma at which they change; with the shift of 3, half of four steps are above Wan 2.2's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        experts = {name: wan_transformer() for name in ("transformer", "transformer_2")}
        pipeline = WanPipeline(**experts, **wan_components(flow_shift=3.0), boundary_ratio=boundary)
    pipeline.save_pretrained(folder)


def write_i2v(folder: Path, *, seed: int, boundary: float | None = 0.875) -> None:
    """The same for `WanImageToVideoPipeline`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        experts = {name: wan_transformer(from_frame=True) for name in ("transformer", "transformer_2")}
        pipeline = WanImageToVideoPipeline(**experts, **wan_components(flow_shift=3.0), boundary_ratio=boundary)
    pipeline.save_pretrained(folder)
