"""Names of adapted layers in the original checkpoints of FLUX.2, which musubi-tuner and ComfyUI use too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["FLUX2"]

_TO, _FROM = "double_blocks.{}", "transformer_blocks.{}"

FLUX2: AdapterNames = {
    f"{_TO}.img_attn.qkv": tuple(f"{_FROM}.attn.to_{part}" for part in "qkv"),
    f"{_TO}.img_attn.proj": (f"{_FROM}.attn.to_out.0",),
    f"{_TO}.img_mlp.0": (f"{_FROM}.ff.linear_in",),
    f"{_TO}.img_mlp.2": (f"{_FROM}.ff.linear_out",),
    f"{_TO}.txt_attn.qkv": tuple(f"{_FROM}.attn.add_{part}_proj" for part in "qkv"),
    f"{_TO}.txt_attn.proj": (f"{_FROM}.attn.to_add_out",),
    f"{_TO}.txt_mlp.0": (f"{_FROM}.ff_context.linear_in",),
    f"{_TO}.txt_mlp.2": (f"{_FROM}.ff_context.linear_out",),
    # Fused in diffusers as well.
    "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
}
