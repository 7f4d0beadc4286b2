"""Names of adapted layers in the original checkpoints of Stable Diffusion 3, which sd-scripts and ComfyUI use too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["MMDIT"]

_TO, _FROM = "joint_blocks.{}", "transformer_blocks.{}"

# Not the modulation of the text stream: in the last block the original has its halves in the other order.
MMDIT: AdapterNames = {
    f"{_TO}.x_block.attn.qkv": tuple(f"{_FROM}.attn.to_{part}" for part in "qkv"),
    f"{_TO}.x_block.attn.proj": (f"{_FROM}.attn.to_out.0",),
    f"{_TO}.x_block.attn2.qkv": tuple(f"{_FROM}.attn2.to_{part}" for part in "qkv"),
    f"{_TO}.x_block.attn2.proj": (f"{_FROM}.attn2.to_out.0",),
    f"{_TO}.x_block.mlp.fc1": (f"{_FROM}.ff.net.0.proj",),
    f"{_TO}.x_block.mlp.fc2": (f"{_FROM}.ff.net.2",),
    f"{_TO}.x_block.adaLN_modulation.1": (f"{_FROM}.norm1.linear",),
    f"{_TO}.context_block.attn.qkv": tuple(f"{_FROM}.attn.add_{part}_proj" for part in "qkv"),
    f"{_TO}.context_block.attn.proj": (f"{_FROM}.attn.to_add_out",),
    f"{_TO}.context_block.mlp.fc1": (f"{_FROM}.ff_context.net.0.proj",),
    f"{_TO}.context_block.mlp.fc2": (f"{_FROM}.ff_context.net.2",),
}
