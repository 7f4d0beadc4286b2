"""A miniature of Qwen3-MoE in its ordinary layout."""

from pathlib import Path

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random
from unirl.models.causal_lm import tiny


def write(folder: Path) -> None:
    """Two layers of four experts, of which each token takes two."""
    tokenizer = byte_tokenizer(tiny.SPECIAL, chat_template=tiny.CHAT_TEMPLATE)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
        hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True,
    )  # fmt: skip
    save_random(folder, Qwen3MoeForCausalLM, config, tokenizer, seed=0)
