"""A random miniature in the ordinary layout, and images for it, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

from unirl.model_host.tokens.image_miniature import media, write_qwen3

__all__ = ["media", "write"]


def write(folder: Path, *, seed: int) -> None:
    """Write a `Qwen3VLForConditionalGeneration` of about 0.1 M random parameters; same seed, same bytes."""
    write_qwen3(folder, seed=seed)
