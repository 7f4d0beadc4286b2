"""HunyuanVideo 1.0, text to video: one latent track, `video`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="hunyuan-video",
    summary="HunyuanVideo 1.0, text to video, from any checkpoint in the diffusers layout",
    build="unirl.models.hunyuan_video.model:build",
    config="unirl.models.hunyuan_video.config:HunyuanVideoConfig",
    capabilities={
        Cap.LATENT_STAGE,
        Cap.LORA,
        # No `guidance`: the model is distilled, and its transformer is told the scale by an option.
        Cap.CONDITIONS,
        Cap.LAZY_BUILD,
    },
    tracks={"video": "latent"},
    options={"video": "unirl.models.hunyuan_video.config:HunyuanVideoOptions"},
    # What it was trained on: 129 frames are five seconds.
    fps=24.0,
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
    splits_sequence=True,
    optional_parts=("encode", "decode"),
    adapter_layouts=dict.fromkeys(
        ("comfy", "kohya", "original"), "unirl.models.hunyuan_video.adapter_layouts:ORIGINAL"
    ),
    wrap_blocks=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
    # Not attention: the norms of queries and keys are shared by all heads, and a rank would have the gradient of its
    # own heads alone.
    tensor_parallel={
        "transformer_blocks.*.ff.net.0.proj": "colwise",
        "transformer_blocks.*.ff.net.2": "rowwise",
        "transformer_blocks.*.ff_context.net.0.proj": "colwise",
        "transformer_blocks.*.ff_context.net.2": "rowwise",
    },
    tiny=Miniature(
        write="unirl.models.hunyuan_video.tiny:write",
        # With the template 128 tokens: matrix products of uneven rows sum equal ones in different orders.
        sampling={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 33},
        # One block of two streams with eight projections, two of one stream with three, one that refines the text with
        # four.
        lora_layers=18,
        wrap_blocks=3,
    ),
    reference="diffusers.HunyuanVideoPipeline",
    parity="unirl.models.hunyuan_video.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
