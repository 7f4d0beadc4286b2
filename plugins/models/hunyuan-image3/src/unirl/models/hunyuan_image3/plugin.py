"""HunyuanImage-3.0: tracks `text` and `image` of one sequence, from text and, if there are any, from source images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

_OF_A_REFERENCE = (
    "a-model-brings-its-miniature-and-its-reference",
    "schedule-is-that-of-the-reference-pipeline",
    "final-latents-are-those-of-the-reference-pipeline",
    "guided-latents-are-those-of-the-reference-pipeline",
    "decoded-media-are-those-of-the-reference-pipeline",
    "prompt-tokens-are-those-of-the-reference",
    "greedy-texts-are-those-of-the-reference",
    "log-probs-are-those-of-the-reference",
)

SPEC = ModelSpec(
    name="hunyuan-image3",
    summary="HunyuanImage 3.0, which writes and draws: text, images and editing by a mixture of experts",
    build="unirl.models.hunyuan_image3.model:build",
    config="unirl.models.hunyuan_image3.config:HunyuanImageConfig",
    capabilities={Cap.LATENT_STAGE, Cap.TEXT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"text": "text", "image": "latent"},
    inputs={"text": {"source": "takes"}, "image": {"source": "takes"}},
    continues=frozenset({"text", "image"}),
    options={
        "text": "unirl.models.hunyuan_image3.config:TextOptions",
        "image": "unirl.models.hunyuan_image3.config:ImageOptions",
    },
    bridged_options=frozenset({"vllm-omni"}),
    bridged_texts=frozenset({"vllm-omni"}),
    token_options=frozenset({"text"}),
    restricts=frozenset({"text"}),
    trainable="transformer",
    lora_targets=("qkv_proj", "o_proj"),
    wrap_blocks=("ExpertsLayer",),
    tiny=Miniature(
        write="unirl.models.hunyuan_image3.tiny:write",
        media="unirl.models.hunyuan_image3.tiny:media",
        sampling={"height": 64, "width": 64},
        # Two layers with two projections.
        lora_layers=4,
        wrap_blocks=2,
    ),
    bridges={"vllm-omni": "unirl.models.hunyuan_image3.bridges.vllm_omni:BRIDGE"},
    gaps=tuple(
        Gap(
            claim=claim,
            reason="the licence of the published code forbids to bring it along; the tests of the package compare with "
            "the formula, written out token by token, and with vLLM-Omni's transformer in its environment",
        )
        for claim in _OF_A_REFERENCE
    ),
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
