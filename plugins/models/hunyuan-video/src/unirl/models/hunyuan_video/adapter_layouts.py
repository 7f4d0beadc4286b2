"""Names of adapted layers in the original checkpoint of HunyuanVideo, which musubi-tuner and ComfyUI read too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["ORIGINAL"]

_TO, _FROM = "double_blocks.{}", "transformer_blocks.{}"
_ONE, _SINGLE = "single_blocks.{}", "single_transformer_blocks.{}"
_TEXT, _REFINER = "txt_in.individual_token_refiner.blocks.{}", "context_embedder.token_refiner.refiner_blocks.{}"

ORIGINAL: AdapterNames = {
    f"{_TO}.img_attn_qkv": tuple(f"{_FROM}.attn.to_{part}" for part in "qkv"),
    f"{_TO}.img_attn_proj": (f"{_FROM}.attn.to_out.0",),
    f"{_TO}.img_mlp.fc1": (f"{_FROM}.ff.net.0.proj",),
    f"{_TO}.img_mlp.fc2": (f"{_FROM}.ff.net.2",),
    f"{_TO}.img_mod.linear": (f"{_FROM}.norm1.linear",),
    f"{_TO}.txt_attn_qkv": tuple(f"{_FROM}.attn.add_{part}_proj" for part in "qkv"),
    f"{_TO}.txt_attn_proj": (f"{_FROM}.attn.to_add_out",),
    f"{_TO}.txt_mlp.fc1": (f"{_FROM}.ff_context.net.0.proj",),
    f"{_TO}.txt_mlp.fc2": (f"{_FROM}.ff_context.net.2",),
    f"{_TO}.txt_mod.linear": (f"{_FROM}.norm1_context.linear",),
    f"{_ONE}.linear1": (*(f"{_SINGLE}.attn.to_{part}" for part in "qkv"), f"{_SINGLE}.proj_mlp"),
    f"{_ONE}.linear2": (f"{_SINGLE}.proj_out",),
    f"{_ONE}.modulation.linear": (f"{_SINGLE}.norm.linear",),
    f"{_TEXT}.self_attn_qkv": tuple(f"{_REFINER}.attn.to_{part}" for part in "qkv"),
    f"{_TEXT}.self_attn_proj": (f"{_REFINER}.attn.to_out.0",),
    f"{_TEXT}.mlp.fc1": (f"{_REFINER}.ff.net.0.proj",),
    f"{_TEXT}.mlp.fc2": (f"{_REFINER}.ff.net.2",),
}
