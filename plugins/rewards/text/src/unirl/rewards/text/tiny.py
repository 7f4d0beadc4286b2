"""A random miniature of a reward model's checkpoint, for tests and conformance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification
from transformers.utils import logging as transformers_logging
from unirl.numerics.model_files import no_progress_bars

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForSequenceClassification(config)
        with torch.no_grad():
            # Every weight moved, so that no zero or one of the initialisation hides a term.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    with no_progress_bars(transformers_logging):
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)
    return {"path": str(folder), "max_length": 512}


def tokenizer(*, chat_template: str | None = _CHAT_TEMPLATE) -> Any:
    """Byte-level BPE without merges: a token a byte, so that every text has one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bare.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    bare.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    return fast
