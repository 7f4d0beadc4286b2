"""Layers of the transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attention_of_blocks"]

_ENDINGS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def attention_of_blocks(transformer: nn.Module) -> tuple[str, ...]:
    """Names of the projections of every block's attention. External engines adapt no others."""
    endings = tuple(f".attn.{ending}" for ending in _ENDINGS)
    names = (name for name, _ in transformer.named_modules())
    return tuple(name for name in names if name.startswith("transformer_blocks.") and name.endswith(endings))
