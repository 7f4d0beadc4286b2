"""Miniatures of families of language models, in their ordinary layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random
from unirl.models.causal_lm import tiny

COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LATENT_ATTENTION = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "Cohere2": {"sliding_window": 4, "logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3": {
        **LATENT_ATTENTION, "v_head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "Gemma": {"head_dim": 32},
    "Gemma3": {"head_dim": 32, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Glm4": {"head_dim": 32},
    "Granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0},
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 4, "head_dim": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo2": {},
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {**EXPERTS, "head_dim": 32},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}  # fmt: skip
"""Name of the family -> what its configuration says besides `COMMON`."""


def write(folder: Path, name: str, **settings: Any) -> Path:
    """A miniature of this family, in its ordinary layout."""
    tokenizer = byte_tokenizer(tiny.SPECIAL, chat_template=tiny.CHAT_TEMPLATE)
    cls = getattr(transformers, f"{name}ForCausalLM")
    values = {**COMMON, **SETTINGS.get(name, {}), **settings}
    config = cls.config_class(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **values)
    save_random(folder, cls, config, tokenizer, seed=0)
    return folder
