"""Facts about a pipeline, found by running it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .latents import Grid
from .records import Layout

__all__ = ["Facts"]


@dataclass
class Facts:
    """Empty until `unirl.models.diffusers.verify` has found them. Copies of a model share one."""

    layouts: dict[bool, Layout] = field(default_factory=lambda: dict[bool, Layout]())
    """Layout of prompts without images (False) and with (True), where the pipeline takes them."""
    most_images: int = 0
    grid: Grid | None = None
    channels: int = 0
    is_inverted: bool = False
    """Sigma is 1 - noise level, and the velocity x0 - x1, as in Mochi."""
    has_whole_timesteps: bool = False
    has_16_bits: bool = False
    """Linear layers of the transformer compute in 16 bits, whatever their weights are kept in."""
    is_verified: bool = False
    """Velocities were compared with the pipeline's own run."""
