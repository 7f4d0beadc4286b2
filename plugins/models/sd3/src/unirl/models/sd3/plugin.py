"""Stable Diffusion 3 and 3.5: one latent track, `image`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="sd3",
    summary="Stable Diffusion 3 and 3.5, text to image, from any checkpoint in the diffusers layout",
    build="unirl.models.sd3.model:build",
    config="unirl.models.sd3.config:Sd3Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"image": "latent"},
    options={"image": "unirl.models.sd3.config:Sd3Options"},
    trainable="transformer",
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ),
    optional_parts=("encode", "decode"),
    adapter_layouts=dict.fromkeys(("comfy", "kohya", "original"), "unirl.models.sd3.adapter_layouts:MMDIT"),
    wrap_blocks=("JointTransformerBlock",),
    # The feed-forward of the image tokens: half of a block's weights. Attention counts its heads when it is made.
    tensor_parallel={
        "transformer_blocks.*.ff.net.0.proj": "colwise",
        "transformer_blocks.*.ff.net.2": "rowwise",
    },
    tiny=Miniature(
        write="unirl.models.sd3.tiny:write",
        sampling={"height": 64, "width": 64, "max_sequence_length": 16},
        # Two blocks of eight projections; the last block has no `to_add_out`.
        lora_layers=15,
        # The last block computes queries of the text, and throws away what they attend to.
        idle_layers=("transformer_blocks.1.attn.add_q_proj",),
        wrap_blocks=2,
    ),
    bridges={
        "sglang": "unirl.models.sd3.bridges.sglang:BRIDGE",
        "vllm-omni": "unirl.models.sd3.bridges.vllm_omni:BRIDGE",
    },
    reference="diffusers.StableDiffusion3Pipeline",
    parity="unirl.models.sd3.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
