"""Qwen3 and Qwen3-MoE: one text track, `text`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["MOE", "SPEC", "unirl_models"]

_CAPABILITIES = {Cap.TEXT_STAGE, Cap.LORA, Cap.LAZY_BUILD, Cap.OBSERVATIONS}
_TARGETS, _BLOCKS = (f"unirl.model_host.module_names:{function}" for function in ("attention_layers", "unsplit_blocks"))

SPEC = ModelSpec(
    name="qwen3",
    summary="Qwen3 dense language models, from any checkpoint in the transformers layout",
    build="unirl.models.qwen3.model:build",
    config="unirl.models.qwen3.config:Qwen3Config",
    capabilities=_CAPABILITIES,
    tracks={"text": "text"},
    trainable="causal_lm",
    lora_targets=_TARGETS,
    splits_sequence=True,
    wrap_blocks=_BLOCKS,
    # Not attention: the norms of queries and keys are shared by all heads, and a rank would have the gradient of its
    # own heads alone.
    tensor_parallel={
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    tiny=Miniature(
        write="unirl.models.qwen3.tiny:write",
        sampling={"max_new_tokens": 8},
        # Two blocks of four projections.
        lora_layers=8,
        wrap_blocks=2,
    ),
    reference="transformers.Qwen3ForCausalLM",
    text_parity="unirl.conformance.text_parity:run",
)

MOE = ModelSpec(
    name="qwen3-moe",
    summary="Qwen3 mixture-of-experts language models, from any checkpoint in the transformers layout",
    build="unirl.models.qwen3.model:build_moe",
    config="unirl.models.qwen3.config:Qwen3Config",
    capabilities=_CAPABILITIES,
    tracks={"text": "text"},
    trainable="causal_lm",
    lora_targets=_TARGETS,
    splits_sequence=True,
    wrap_blocks=_BLOCKS,
    tiny=Miniature(
        write="unirl.models.qwen3.tiny:write_moe", sampling={"max_new_tokens": 8}, lora_layers=8, wrap_blocks=2
    ),
    reference="transformers.Qwen3MoeForCausalLM",
    text_parity="unirl.conformance.text_parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, MOE]
