"""Wan 2.1 and Wan 2.2: one latent track, `video`, from text, or from a first frame and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["WAN21", "WAN21_I2V", "WAN22", "WAN22_I2V", "unirl_models"]

_PACKAGE = "unirl.models.wan"
# Not attention: the norms of queries and keys are taken over all heads.
_FEED_FORWARD: Mapping[str, Literal["colwise", "rowwise"]] = {
    "blocks.*.ffn.net.0.proj": "colwise",
    "blocks.*.ffn.net.2": "rowwise",
}
_TINY = Miniature(
    write=f"{_PACKAGE}.tiny:write_wan21",
    sampling={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 16},
    # Two blocks of eight projections.
    lora_layers=16,
    wrap_blocks=2,
)
_TINY_EXPERTS = replace(_TINY, write=f"{_PACKAGE}.tiny:write_wan22", lora_layers=32, wrap_blocks=4)


def _bridges(bridge: str) -> Mapping[str, str]:
    return {"sglang": f"{_PACKAGE}.bridges.sglang:{bridge}", "vllm-omni": f"{_PACKAGE}.bridges.vllm_omni:{bridge}"}


WAN21 = ModelSpec(
    name="wan21",
    summary="Wan 2.1, text to video, from any checkpoint in the diffusers layout",
    build=f"{_PACKAGE}.model:build",
    config=f"{_PACKAGE}.config:Wan21Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"video": "latent"},
    # The rate at which diffusers' example exports videos.
    fps=16.0,
    trainable="transformer",
    lora_targets=tuple(
        f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    splits_sequence=True,
    optional_parts=("encode", "decode"),
    adapter_layouts=dict.fromkeys(("comfy", "kohya", "original"), f"{_PACKAGE}.adapter_layouts:WAN"),
    wrap_blocks=("WanTransformerBlock",),
    tensor_parallel=_FEED_FORWARD,
    tiny=_TINY,
    bridges=_bridges("ONE_EXPERT"),
    reference="diffusers.WanPipeline",
    parity=f"{_PACKAGE}.parity:run",
)
WAN22 = replace(
    WAN21,
    name="wan22",
    summary="Wan 2.2, text to video with two experts, from the diffusers layout",
    config=f"{_PACKAGE}.config:Wan22Config",
    trainable="denoisers",
    tensor_parallel={
        f"{expert}.{layer}": style
        for expert in ("transformer", "transformer_2")
        for layer, style in _FEED_FORWARD.items()
    },
    tiny=_TINY_EXPERTS,
    bridges=_bridges("TWO_EXPERTS"),
)
_FROM_FRAME: Mapping[str, Any] = {
    "inputs": {"video": {"source": "needs one"}},
    "reference": "diffusers.WanImageToVideoPipeline",
    "parity": f"{_PACKAGE}.parity:run_i2v",
}
WAN21_I2V = replace(
    WAN21,
    name="wan21-i2v",
    summary="Wan 2.1, image and text to video, from any checkpoint in the diffusers layout",
    config=f"{_PACKAGE}.config:Wan21I2VConfig",
    tiny=replace(
        _TINY,
        write=f"{_PACKAGE}.tiny:write_wan21_i2v",
        media=f"{_PACKAGE}.tiny:first_frame",
        # Beside features of images the transformer takes no other length.
        sampling={**_TINY.sampling, "max_sequence_length": 512},
    ),
    bridges=_bridges("ONE_EXPERT_FROM_FRAME"),
    **_FROM_FRAME,
)
WAN22_I2V = replace(
    WAN22,
    name="wan22-i2v",
    summary="Wan 2.2, image and text to video with two experts, from the diffusers layout",
    config=f"{_PACKAGE}.config:Wan22I2VConfig",
    tiny=replace(_TINY_EXPERTS, write=f"{_PACKAGE}.tiny:write_wan22_i2v", media=f"{_PACKAGE}.tiny:first_frame"),
    bridges=_bridges("TWO_EXPERTS_FROM_FRAME"),
    **_FROM_FRAME,
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [WAN21, WAN21_I2V, WAN22, WAN22_I2V]
