"""Names of adapted layers in the original checkpoint of HunyuanVideo 1.5, which musubi-tuner uses too, and in ComfyUI,
which fuses attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["FUSED", "ORIGINAL"]

_TO, _FROM = "double_blocks.{}", "transformer_blocks.{}"
_IMAGE = tuple(f"{_FROM}.attn.to_{part}" for part in "qkv")
_TEXT = tuple(f"{_FROM}.attn.add_{part}_proj" for part in "qkv")

ORIGINAL: AdapterNames = {
    **{f"{_TO}.img_attn_{part}": (name,) for part, name in zip("qkv", _IMAGE, strict=True)},
    f"{_TO}.img_attn_proj": (f"{_FROM}.attn.to_out.0",),
    f"{_TO}.img_mlp.fc1": (f"{_FROM}.ff.net.0.proj",),
    f"{_TO}.img_mlp.fc2": (f"{_FROM}.ff.net.2",),
    f"{_TO}.img_mod.linear": (f"{_FROM}.norm1.linear",),
    **{f"{_TO}.txt_attn_{part}": (name,) for part, name in zip("qkv", _TEXT, strict=True)},
    f"{_TO}.txt_attn_proj": (f"{_FROM}.attn.to_add_out",),
    f"{_TO}.txt_mlp.fc1": (f"{_FROM}.ff_context.net.0.proj",),
    f"{_TO}.txt_mlp.fc2": (f"{_FROM}.ff_context.net.2",),
    f"{_TO}.txt_mod.linear": (f"{_FROM}.norm1_context.linear",),
}
FUSED: AdapterNames = {
    f"{_TO}.img_attn.qkv": _IMAGE,
    f"{_TO}.img_attn.proj": (f"{_FROM}.attn.to_out.0",),
    f"{_TO}.img_mlp.0": (f"{_FROM}.ff.net.0.proj",),
    f"{_TO}.img_mlp.2": (f"{_FROM}.ff.net.2",),
    f"{_TO}.img_mod.lin": (f"{_FROM}.norm1.linear",),
    f"{_TO}.txt_attn.qkv": _TEXT,
    f"{_TO}.txt_attn.proj": (f"{_FROM}.attn.to_add_out",),
    f"{_TO}.txt_mlp.0": (f"{_FROM}.ff_context.net.0.proj",),
    f"{_TO}.txt_mlp.2": (f"{_FROM}.ff_context.net.2",),
    f"{_TO}.txt_mod.lin": (f"{_FROM}.norm1_context.linear",),
}
