"""Qwen-Image: one latent track, `image`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="qwen-image",
    summary="Qwen-Image, text to image, from any checkpoint in the diffusers layout",
    build="unirl.models.qwen_image.model:build",
    config="unirl.models.qwen_image.config:QwenImageConfig",
    capabilities={
        Cap.LATENT_STAGE: Support.NATIVE,
        Cap.TEXT_STAGE: Support.NO,
        Cap.LORA: Support.NATIVE,
        Cap.GUIDANCE: Support.NATIVE,
        Cap.CONDITIONS: Support.NATIVE,
        Cap.LAZY_BUILD: Support.NATIVE,
    },
    tracks={"image": "latent"},
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
    wrap_blocks=("QwenImageTransformerBlock",),
    # Not attention: the norms of queries and keys are shared by all heads, and a rank would have the gradient of its
    # own heads alone.
    tensor_parallel={
        "transformer_blocks.*.img_mlp.net.0.proj": "colwise",
        "transformer_blocks.*.img_mlp.net.2": "rowwise",
        "transformer_blocks.*.txt_mlp.net.0.proj": "colwise",
        "transformer_blocks.*.txt_mlp.net.2": "rowwise",
    },
    tiny=Miniature(
        write="unirl.models.qwen_image.tiny:write",
        sampling={"height": 64, "width": 64, "max_sequence_length": 32, "guidance_mode": "norm-corrected"},
        # Two blocks of eight projections.
        lora_layers=16,
        # The last block computes queries of the text, and throws away what they attend to.
        idle_layers=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
        wrap_blocks=2,
    ),
    bridges={
        "sglang": "unirl.models.qwen_image.bridges.sglang:BRIDGE",
        "vllm-omni": "unirl.models.qwen_image.bridges.vllm_omni:BRIDGE",
    },
    reference="diffusers.QwenImagePipeline",
    parity="unirl.models.qwen_image.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
