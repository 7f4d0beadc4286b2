"""Any vision-language model of transformers: one text track, `text`, written about images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="vlm",
    summary="Any vision-language model of transformers: text about images, from a checkpoint in its layout",
    build="unirl.models.vlm.model:build",
    config="unirl.models.vlm.config:VlmConfig",
    capabilities={Cap.TEXT_STAGE, Cap.LORA, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"text": "text"},
    inputs={"text": {"condition": "needs"}},
    trainable="causal_lm",
    lora_targets="unirl.model_host.module_names:trained_attention_layers",
    wrap_blocks="unirl.model_host.module_names:unsplit_blocks",
    tiny=Miniature(
        write="unirl.models.vlm.tiny:write",
        media="unirl.models.vlm.tiny:media",
        sampling={"max_new_tokens": 8},
        # Two text blocks of four projections; two text and two vision blocks.
        lora_layers=8,
        wrap_blocks=4,
    ),
    reference="transformers.AutoModelForImageTextToText",
    text_parity="unirl.conformance.image_text_parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
