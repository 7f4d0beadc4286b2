"""Names of adapted layers of Qwen-Image: those of diffusers, in which it was published; ComfyUI uses them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["BLOCKS"]

BLOCKS: AdapterNames = {"transformer_blocks.{}": ("transformer_blocks.{}",)}
