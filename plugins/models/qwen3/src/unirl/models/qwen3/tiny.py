"""Random miniature checkpoints in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

__all__ = ["CHAT_TEMPLATE", "write", "write_moe"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("<think>", "</think>")

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
"""As Qwen3's own template for plain chats: roles in turn, and an empty thought where thinking is switched off."""


def write(folder: Path, *, seed: int, tied: bool = True) -> None:
    """Write a `Qwen3ForCausalLM` of about 0.1 M random parameters; same seed, same bytes.

    4 heads share 2 keys, and the heads together are wider than the model, as in the small checkpoints of Qwen3.
    tied: the output projection is the embedding.
    """
    tokenizer = _tokenizer()
    save_random(folder, Qwen3ForCausalLM, Qwen3Config(**_shape(tokenizer, tied=tied)), tokenizer, seed=seed)


def write_moe(folder: Path, *, seed: int) -> None:
    """Write a `Qwen3MoeForCausalLM` with four experts, two of them at work for a token; same seed, same bytes."""
    tokenizer = _tokenizer()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**_shape(tokenizer, tied=False), **experts)
    save_random(folder, Qwen3MoeForCausalLM, config, tokenizer, seed=seed)


def _shape(tokenizer: Any, *, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "bos_token_id": None,
    }


def _tokenizer() -> Any:
    return byte_tokenizer(_SPECIAL, words=_WORDS, chat_template=CHAT_TEMPLATE)
