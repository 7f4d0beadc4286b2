"""A random miniature in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

__all__ = ["CHAT_TEMPLATE", "SPECIAL", "write"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, *, seed: int) -> None:
    """Write a `LlamaForCausalLM` of about 0.1 M random parameters; same seed, same bytes.

    4 heads share 2 keys; of 32 elements each, as vLLM's attention on a CPU takes none below.
    """
    tokenizer = byte_tokenizer(SPECIAL, chat_template=CHAT_TEMPLATE)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    save_random(folder, LlamaForCausalLM, config, tokenizer, seed=seed)
