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


MIXED = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = {
    **MIXED, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "head_dim": 16,
}  # fmt: skip
FEW = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
       "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
       "first_k_dense_replace": 1}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4}  # fmt: skip
INDEXED = {**FEW, **LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "use_mamba_kernels": False}
STATES: Mapping[str, Mapping[str, Any]] = {
    "BailingHybrid": {**FEW, **LATENT, **MIXED, "head_dim": 16, "num_mtp_layers": 0},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "DeepseekV32": INDEXED,
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64},
    "FalconMamba": {"state_size": 8},
    "GlmMoeDsa": INDEXED,
    "GraniteMoeHybrid": {**FEW, **MAMBA, "layer_types": ["mamba", "attention"], "attention_multiplier": 0.25},
    "Jamba": {**FEW, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "KimiLinear": {**FEW, **LATENT, **MIXED, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 2},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "Lfm2Moe": {**FEW, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "MiniMaxM3VL": {**FEW, "head_dim": 16, "dense_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2,
                    "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
    "NemotronH": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                  "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "head_dim": 16},
    "OlmoHybrid": {**LINEAR, "linear_num_value_heads": 2, "linear_value_head_dim": 16, "num_key_value_heads": 4},
    "Qwen3Next": {**FEW, **LINEAR},
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": {**FEW, **LINEAR},
    "Zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8,
              "use_mamba_kernels": False, "num_key_value_heads": 4},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16,
               "chunk_size": 8, "num_key_value_heads": 4},
    "Zaya": {"num_experts": 2, "moe_intermediate_size": 16, "router_hidden_size": 8, "head_dim": 16},
    # Refused, each for its own reason.
    "DeepseekV4": {**FEW, "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
                   "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
                   "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8,
                   "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "sliding_window": 8, "hc_mult": 2,
                   "num_nextn_predict_layers": 0},
    "MiniMax": {**FEW, **MIXED, "head_dim": 16, "block_size": 8},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8, "lru_width": 32,
                       "head_dim": 16},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 512},
    "xLSTM": {"num_heads": 2, "num_blocks": 2},
}  # fmt: skip
"""Families whose caches hold more than keys and values, with what their configuration says besides `SMALL`."""
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "GPT2LMHeadModel": {},
    "Llama4": {"head_dim": 16, "intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
}
"""Families that keep their trunk, or a decoder in it, under names of their own."""
HYBRIDS = ("Lfm2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Those of `STATES` that are compared as `SETTINGS` are, but for tokens shared by ranks."""
SMALL = {**COMMON, "hidden_size": 32, "intermediate_size": 32}


def write(folder: Path, name: str, **settings: Any) -> Path:
    """A miniature of this family, in its ordinary layout."""
    tokenizer = byte_tokenizer(tiny.SPECIAL, chat_template=tiny.CHAT_TEMPLATE)
    cls = getattr(transformers, name if name.endswith("Model") else f"{name}ForCausalLM")
    small = {**STATES, **OTHERS}
    own = {**SMALL, **small[name]} if name in small else {**COMMON, **SETTINGS.get(name, {})}
    values = {**own, **settings}
    config_class = cls.config_class.sub_configs.get("text_config", cls.config_class)
    config = config_class(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **values)
    save_random(folder, cls, config, tokenizer, seed=0)
    return folder
