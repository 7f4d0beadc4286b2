"""Janus: tracks `text`, about images if there are any, and `image`, whose samples are image tokens."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="janus",
    summary="Janus and Janus-Pro, which write and draw with tokens, from any checkpoint in the transformers layout",
    build="unirl.models.janus.model:build",
    config="unirl.models.janus.config:JanusConfig",
    capabilities={Cap.TEXT_STAGE, Cap.LORA, Cap.CONDITIONS},
    tracks={"text": "text", "image": "text"},
    media={"image": "image"},
    inputs={"text": {"condition": "takes"}},
    continues=frozenset({"image"}),
    options={"image": "unirl.models.janus.config:ImageOptions"},
    token_options=frozenset({"image"}),
    trainable="causal_lm",
    lora_targets="unirl.model_host.module_names:trained_attention_layers",
    # Not the quantizer of `_no_split_modules`: its codebook is read outside of its own forward.
    wrap_blocks=("LlamaDecoderLayer", "JanusVisionEncoderLayer"),
    tiny=Miniature(
        write="unirl.models.janus.tiny:write",
        media="unirl.models.janus.tiny:media",
        sampling={"max_new_tokens": 8},
        # Two text blocks of four projections; two text blocks and a vision block.
        lora_layers=8,
        wrap_blocks=3,
    ),
    reference="transformers.JanusForConditionalGeneration",
    gaps=tuple(
        Gap(
            claim=claim,
            reason="the parity of conformance has an image in every prompt; the tests of the package compare texts, "
            "image tokens and pixels with transformers",
        )
        for claim in (
            "a-model-brings-its-miniature-and-its-reference",
            "prompt-tokens-are-those-of-the-reference",
            "greedy-texts-are-those-of-the-reference",
            "log-probs-are-those-of-the-reference",
        )
    ),
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
