"""Settings of the TensorBoard tracker."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["TensorboardConfig"]


@dataclass
class TensorboardConfig(PartConfig):
    max_images: int = 16
    """Images of one grid; further ones are left out."""
    max_texts: int = 16
    """Texts shown at once under one key, whole; further ones are left out."""
    flush_s: int = 10
    """Longest time that numbers stay in memory, in seconds."""
