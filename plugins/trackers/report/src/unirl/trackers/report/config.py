"""Settings of the report."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["ReportConfig"]


@dataclass
class ReportConfig(PartConfig):
    max_images: int = 32
    """Images saved of one batch; further ones are left out."""
    max_texts: int = 32
    """Texts saved of one batch, whole; further ones are left out."""
    pairs: int = 16
    """Held-out samples shown before and after."""
    gallery_steps: int = 8
    """Training steps of which samples are shown, spread over the run."""
    gallery_samples: int = 8
    """Samples shown of each of those steps."""
