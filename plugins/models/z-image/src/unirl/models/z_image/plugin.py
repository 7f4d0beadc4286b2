"""Z-Image: one latent track, `image`."""

from __future__ import annotations

from typing import Literal

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

_FEED_FORWARD: dict[str, Literal["colwise", "rowwise"]] = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}

SPEC = ModelSpec(
    name="z-image",
    summary="Z-Image and Z-Image-Turbo, text to image, from any checkpoint in the diffusers layout",
    build="unirl.models.z_image.model:build",
    config="unirl.models.z_image.config:ZImageConfig",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"image": "latent"},
    trainable="transformer",
    lora_targets=("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    optional_parts=("encode", "decode"),
    adapter_layouts={
        "comfy": "unirl.models.z_image.adapter_layouts:FUSED",
        "kohya": "unirl.models.z_image.adapter_layouts:SPLIT",
    },
    wrap_blocks=("ZImageTransformerBlock",),
    tensor_parallel={
        f"{blocks}.*.feed_forward.{layer}": style
        for blocks in ("noise_refiner", "context_refiner", "layers")
        for layer, style in _FEED_FORWARD.items()
    },
    tiny=Miniature(
        write="unirl.models.z_image.tiny:write",
        # 4 x 4 tokens, so that the image is padded, as the prompt is.
        sampling={"height": 64, "width": 64, "max_sequence_length": 48},
        # One refiner of each stream and two blocks, of four projections each.
        lora_layers=16,
        wrap_blocks=4,
    ),
    bridges={
        "sglang": "unirl.models.z_image.bridges.sglang:BRIDGE",
        "vllm-omni": "unirl.models.z_image.bridges.vllm_omni:BRIDGE",
    },
    reference="diffusers.ZImagePipeline",
    parity="unirl.models.z_image.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
