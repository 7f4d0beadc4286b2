"""HunyuanVideo 1.5, text to video and image to video: one latent track, `video`."""

from __future__ import annotations

from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["IMAGE", "SPEC", "unirl_models"]

_TINY = "unirl.models.hunyuan_video15.tiny"

SPEC = ModelSpec(
    name="hunyuan-video15",
    summary="HunyuanVideo 1.5, text to video, from any checkpoint in the diffusers layout",
    build="unirl.models.hunyuan_video15.model:build",
    config="unirl.models.hunyuan_video15.config:HunyuanVideo15Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"video": "latent"},
    # What it was trained on: 121 frames are five seconds.
    fps=24.0,
    trainable="transformer",
    # Of the blocks, and not of the text refiner, whose layers have the same endings.
    lora_targets="unirl.models.hunyuan_video15.layers:attention_of_blocks",
    splits_sequence=True,
    optional_parts=("encode", "decode"),
    adapter_layouts={
        "comfy": "unirl.models.hunyuan_video15.adapter_layouts:FUSED",
        "kohya": "unirl.models.hunyuan_video15.adapter_layouts:ORIGINAL",
        "original": "unirl.models.hunyuan_video15.adapter_layouts:ORIGINAL",
    },
    wrap_blocks=("HunyuanVideo15TransformerBlock",),
    # Not attention: the norms of queries and keys are shared by all heads, and a rank would have the gradient of its
    # own heads alone.
    tensor_parallel={
        "transformer_blocks.*.ff.net.0.proj": "colwise",
        "transformer_blocks.*.ff.net.2": "rowwise",
        "transformer_blocks.*.ff_context.net.0.proj": "colwise",
        "transformer_blocks.*.ff_context.net.2": "rowwise",
    },
    tiny=Miniature(
        write=f"{_TINY}:write",
        # With the template 160 tokens: matrix products of uneven rows sum equal ones in different orders.
        sampling={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 52},
        # Two blocks of eight projections.
        lora_layers=16,
        # The last block computes queries of the text, and throws away what they attend to.
        idle_layers=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
        wrap_blocks=2,
    ),
    bridges={"vllm-omni": "unirl.models.hunyuan_video15.bridges.vllm_omni:BRIDGE"},
    gaps=(
        Gap(
            claim="velocity-follows-every-condition",
            reason="glyphs are read of quoted words alone, and the claim's prompts have none; the plugin's tests quote",
        ),
    ),
    reference="diffusers.HunyuanVideo15Pipeline",
    parity="unirl.models.hunyuan_video15.parity:run",
)

assert SPEC.tiny is not None
IMAGE = replace(
    SPEC,
    name="hunyuan-video15-i2v",
    summary="HunyuanVideo 1.5, image to video, from any checkpoint in the diffusers layout",
    build="unirl.models.hunyuan_video15.image:build",
    config="unirl.models.hunyuan_video15.config:HunyuanVideo15ImageConfig",
    inputs={"video": {"source": "needs one"}},
    bridges={"vllm-omni": "unirl.models.hunyuan_video15.bridges.vllm_omni_image:BRIDGE"},
    tiny=replace(SPEC.tiny, write=f"{_TINY}:write_image", media=f"{_TINY}:media"),
    reference="diffusers.HunyuanVideo15ImageToVideoPipeline",
    parity="unirl.models.hunyuan_video15.parity:run_image",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, IMAGE]
