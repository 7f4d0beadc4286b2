"""BAGEL: tracks `text` and `image` of one sequence, from text and, if there are any, from source images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

_LAST = "language_model.model.layers.1.self_attn"
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
    name="bagel",
    summary="BAGEL, which writes and draws: text, images and editing by one model, from its published layout",
    build="unirl.models.bagel.model:build",
    config="unirl.models.bagel.config:BagelConfig",
    capabilities={Cap.LATENT_STAGE, Cap.TEXT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"text": "text", "image": "latent"},
    inputs={"text": {"source": "takes"}, "image": {"source": "takes"}},
    continues=frozenset({"text", "image"}),
    options={
        "text": "unirl.models.bagel.config:TextOptions",
        "image": "unirl.models.bagel.config:ImageOptions",
    },
    bridged_options=frozenset({"vllm-omni"}),
    bridged_texts=frozenset({"vllm-omni"}),
    trainable="transformer",
    lora_targets=tuple(f"{name}_proj{expert}" for expert in ("", "_moe_gen") for name in "qkvo"),
    wrap_blocks=("MixtureLayer",),
    tiny=Miniature(
        write="unirl.models.bagel.tiny:write",
        media="unirl.models.bagel.tiny:media",
        sampling={"height": 64, "width": 64},
        # Two layers with four projections of each expert.
        lora_layers=16,
        # An image takes nothing from the text's own outputs of the last layer.
        idle_layers=(f"{_LAST}.q_proj", f"{_LAST}.o_proj"),
        wrap_blocks=2,
    ),
    bridges={
        "vllm": "unirl.models.bagel.bridges.vllm:BRIDGE",
        "vllm-omni": "unirl.models.bagel.bridges.vllm_omni:BRIDGE",
    },
    text_alone={
        "vllm": "it scales every image to one square and gives each of its patches a position of its own, where all "
        "patches of an image have one"
    },
    gaps=tuple(
        Gap(
            claim=claim,
            reason="the published code runs on GPUs with flash attention alone; the tests of the package compare with "
            "the formula, written out token by token",
        )
        for claim in _OF_A_REFERENCE
    ),
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
