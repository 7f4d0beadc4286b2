"""Qwen-Image and its editing models: one latent track, `image`."""

from __future__ import annotations

from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["EDIT", "EDIT_PLUS", "SPEC", "unirl_models"]

_TINY = "unirl.models.qwen_image.tiny"

SPEC = ModelSpec(
    name="qwen-image",
    summary="Qwen-Image, text to image, from any checkpoint in the diffusers layout",
    build="unirl.models.qwen_image.model:build",
    config="unirl.models.qwen_image.config:QwenImageConfig",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
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
    adapter_layouts=dict.fromkeys(("comfy", "kohya"), "unirl.models.qwen_image.adapter_layouts:BLOCKS"),
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
        write=f"{_TINY}:write",
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


assert SPEC.tiny is not None
EDIT = replace(
    SPEC,
    name="qwen-image-edit",
    summary="Qwen-Image-Edit, editing of one source image, from any checkpoint in the diffusers layout",
    build="unirl.models.qwen_image.edit:build",
    config="unirl.models.qwen_image.config:QwenImageEditConfig",
    inputs={"image": {"source": "needs one"}},
    tiny=replace(SPEC.tiny, write=f"{_TINY}:write_edit", media=f"{_TINY}:media"),
    # 16 tokens of a source in place of 4096.
    trial={"source_area": 64 * 64},
    bridges={
        "sglang": "unirl.models.qwen_image.bridges.sglang_edit:BRIDGE",
        "vllm-omni": "unirl.models.qwen_image.bridges.vllm_omni_edit:BRIDGE",
    },
    reference="diffusers.QwenImageEditPipeline",
    parity="unirl.models.qwen_image.parity:run_edit",
)
EDIT_PLUS = replace(
    EDIT,
    name="qwen-image-edit-plus",
    summary="Qwen-Image-Edit-2509 and later, editing with several source images, from the diffusers layout",
    build="unirl.models.qwen_image.edit:build_plus",
    config="unirl.models.qwen_image.config:QwenImageEditPlusConfig",
    inputs={"image": {"source": "needs"}},
    tiny=replace(SPEC.tiny, write=f"{_TINY}:write_edit_plus", media=f"{_TINY}:media_plus"),
    trial={"source_area": 64 * 64, "condition_area": 48 * 48},
    bridges={
        "sglang": "unirl.models.qwen_image.bridges.sglang_edit:BRIDGE_PLUS",
        "vllm-omni": "unirl.models.qwen_image.bridges.vllm_omni_edit:BRIDGE_PLUS",
    },
    reference="diffusers.QwenImageEditPlusPipeline",
    parity="unirl.models.qwen_image.parity:run_edit_plus",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, EDIT, EDIT_PLUS]
