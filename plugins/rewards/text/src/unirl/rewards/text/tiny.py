"""A random miniature of a reward model's checkpoint, for tests and conformance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForSequenceClassification
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

__all__ = ["tokenizer", "write"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)


def write(folder: Path, *, seed: int, num_labels: int = 1) -> Mapping[str, Any]:
    """Write a `Qwen3ForSequenceClassification` of about 0.05 M random parameters, as Skywork-Reward-V2 is published.

    Same seed, same bytes. Returns the settings that load it.
    """
    tokens = tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=tokens.pad_token_id,
    )
    config.num_labels = num_labels
    save_random(folder, Qwen3ForSequenceClassification, config, tokens, seed=seed)
    return {"path": str(folder), "max_length": 512}


def tokenizer(*, chat_template: str | None = _CHAT_TEMPLATE) -> Any:
    return byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], chat_template=chat_template)
