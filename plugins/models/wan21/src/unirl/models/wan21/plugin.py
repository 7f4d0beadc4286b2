"""Wan 2.1: one latent track, `video`, from text, or from a first frame and text."""

from __future__ import annotations

from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["I2V", "SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="wan21",
    summary="Wan 2.1, text to video, from any checkpoint in the diffusers layout",
    build="unirl.models.wan21.model:build",
    config="unirl.models.wan21.config:Wan21Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"video": "latent"},
    # What diffusers' example exports videos with.
    fps=16.0,
    trainable="transformer",
    lora_targets=(
        "attn1.to_q",
        "attn1.to_k",
        "attn1.to_v",
        "attn1.to_out.0",
        "attn2.to_q",
        "attn2.to_k",
        "attn2.to_v",
        "attn2.to_out.0",
    ),
    splits_sequence=True,
    optional_parts=("encode", "decode"),
    wrap_blocks=("WanTransformerBlock",),
    # Not attention: the norms of queries and keys are taken over all heads.
    tensor_parallel={
        "blocks.*.ffn.net.0.proj": "colwise",
        "blocks.*.ffn.net.2": "rowwise",
    },
    tiny=Miniature(
        write="unirl.models.wan21.tiny:write",
        sampling={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 16},
        # Two blocks of eight projections.
        lora_layers=16,
        wrap_blocks=2,
    ),
    bridges={
        "sglang": "unirl.numerics.diffusion.wan_in_sglang:ONE_EXPERT",
        "vllm-omni": "unirl.numerics.diffusion.wan_in_vllm_omni:ONE_EXPERT",
    },
    reference="diffusers.WanPipeline",
    parity="unirl.models.wan21.parity:run",
)

assert SPEC.tiny is not None
I2V = replace(
    SPEC,
    name="wan21-i2v",
    summary="Wan 2.1, image and text to video, from any checkpoint in the diffusers layout",
    build="unirl.models.wan21.i2v:build",
    config="unirl.models.wan21.config:Wan21I2VConfig",
    inputs={"video": {"source": "needs one"}},
    tiny=replace(
        SPEC.tiny,
        write="unirl.models.wan21.tiny:write_i2v",
        media="unirl.numerics.diffusion.wan_miniature:first_frame",
        # Behind features of images the transformer takes no other length.
        sampling={**SPEC.tiny.sampling, "max_sequence_length": 512},
    ),
    bridges={
        "sglang": "unirl.numerics.diffusion.wan_first_frame_in_sglang:ONE_EXPERT",
        "vllm-omni": "unirl.numerics.diffusion.wan_first_frame_in_vllm_omni:ONE_EXPERT",
    },
    reference="diffusers.WanImageToVideoPipeline",
    parity="unirl.models.wan21.parity:run_i2v",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, I2V]
