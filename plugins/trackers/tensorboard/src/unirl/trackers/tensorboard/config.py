"""Settings of the TensorBoard tracker."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.core.specs.part_config import PartConfig

__all__ = ["TensorboardConfig"]


@dataclass
class TensorboardConfig(PartConfig):
    max_images: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images in a grid."""
    max_texts: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions logged per key and step, in full."""
    flush_s: int = limit(10, least=1)
    """Maximum time between flushes to disk, in seconds."""
