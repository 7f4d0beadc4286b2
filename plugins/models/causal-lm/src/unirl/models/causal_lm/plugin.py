"""Any causal language model of transformers: one text track, `text`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="causal-lm",
    summary="Any causal language model of transformers, from a checkpoint in its layout",
    build="unirl.models.causal_lm.model:build",
    config="unirl.models.causal_lm.config:AutoCausalLmConfig",
    capabilities={Cap.TEXT_STAGE, Cap.LORA, Cap.LAZY_BUILD, Cap.OBSERVATIONS},
    tracks={"text": "text"},
    trainable="causal_lm",
    splits_sequence=True,
    lora_targets="unirl.model_host.module_names:attention_layers",
    wrap_blocks="unirl.model_host.module_names:unsplit_blocks",
    tiny=Miniature(
        write="unirl.models.causal_lm.tiny:write",
        sampling={"max_new_tokens": 8},
        # Two blocks of four projections.
        lora_layers=8,
        wrap_blocks=2,
    ),
    reference="transformers.AutoModelForCausalLM",
    text_parity="unirl.conformance.text_parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
