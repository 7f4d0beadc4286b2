"""Names of adapted layers in the original checkpoints of Wan, which musubi-tuner and ComfyUI use too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["WAN"]

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}

WAN: AdapterNames = {
    **{f"blocks.{{}}.self_attn.{to}": (f"blocks.{{}}.attn1.{name}",) for to, name in _ATTENTION.items()},
    **{f"blocks.{{}}.cross_attn.{to}": (f"blocks.{{}}.attn2.{name}",) for to, name in _ATTENTION.items()},
    "blocks.{}.cross_attn.k_img": ("blocks.{}.attn2.add_k_proj",),
    "blocks.{}.cross_attn.v_img": ("blocks.{}.attn2.add_v_proj",),
    "blocks.{}.ffn.0": ("blocks.{}.ffn.net.0.proj",),
    "blocks.{}.ffn.2": ("blocks.{}.ffn.net.2",),
}
