"""Wan 2.2: one latent track, `video`, from two experts; from text, or from a first frame and text."""

from __future__ import annotations

from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["I2V", "SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="wan22",
    summary="Wan 2.2, text to video with two experts, from the diffusers layout",
    build="unirl.models.wan22.model:build",
    config="unirl.models.wan22.config:Wan22Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"video": "latent"},
    # What diffusers' example exports videos with.
    fps=16.0,
    trainable="denoisers",
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
    optional_parts=("encode", "decode"),
    wrap_blocks=("WanTransformerBlock",),
    # Not attention: the norms of queries and keys are taken over all heads.
    tensor_parallel={
        "transformer.blocks.*.ffn.net.0.proj": "colwise",
        "transformer.blocks.*.ffn.net.2": "rowwise",
        "transformer_2.blocks.*.ffn.net.0.proj": "colwise",
        "transformer_2.blocks.*.ffn.net.2": "rowwise",
    },
    splits_sequence=True,
    tiny=Miniature(
        write="unirl.models.wan22.tiny:write",
        sampling={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 16},
        # Two experts of two blocks of eight projections.
        lora_layers=32,
        wrap_blocks=4,
    ),
    bridges={
        "sglang": "unirl.numerics.diffusion.wan_in_sglang:TWO_EXPERTS",
        "vllm-omni": "unirl.numerics.diffusion.wan_in_vllm_omni:TWO_EXPERTS",
    },
    reference="diffusers.WanPipeline",
    parity="unirl.models.wan22.parity:run",
)

assert SPEC.tiny is not None
I2V = replace(
    SPEC,
    name="wan22-i2v",
    summary="Wan 2.2, image and text to video with two experts, from the diffusers layout",
    build="unirl.models.wan22.i2v:build",
    config="unirl.models.wan22.config:Wan22I2VConfig",
    inputs={"video": {"source": "needs one"}},
    tiny=replace(
        SPEC.tiny,
        write="unirl.models.wan22.tiny:write_i2v",
        media="unirl.numerics.diffusion.wan_miniature:first_frame",
    ),
    bridges={
        "sglang": "unirl.numerics.diffusion.wan_first_frame_in_sglang:TWO_EXPERTS",
        "vllm-omni": "unirl.numerics.diffusion.wan_first_frame_in_vllm_omni:TWO_EXPERTS",
    },
    reference="diffusers.WanImageToVideoPipeline",
    parity="unirl.models.wan22.parity:run_i2v",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, I2V]
