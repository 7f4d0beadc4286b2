"""Settings of the report."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.core.specs.part_config import PartConfig

__all__ = ["ReportConfig"]


@dataclass
class ReportConfig(PartConfig):
    max_images: int = limit(32, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images saved per batch."""
    max_texts: int = limit(32, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions saved per batch, in full."""
    pairs: int = limit(16, least=1)
    """Held-out samples shown side by side, before and after training."""
    gallery_steps: int = limit(8, least=1)
    """Training steps whose samples are shown, evenly spread over the run."""
    gallery_samples: int = limit(8, least=1)
    """Samples shown per step."""
