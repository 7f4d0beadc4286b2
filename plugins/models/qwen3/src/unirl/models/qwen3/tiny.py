"""Random miniature checkpoints in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging
from unirl.numerics.model_files import no_progress_bars

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
    _save(folder, Qwen3ForCausalLM, Qwen3Config(**_shape(tokenizer, tied=tied)), tokenizer, seed=seed)


def write_moe(folder: Path, *, seed: int) -> None:
    """Write a `Qwen3MoeForCausalLM` with four experts, two of them at work for a token; same seed, same bytes."""
    tokenizer = _tokenizer()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**_shape(tokenizer, tied=False), **experts)
    _save(folder, Qwen3MoeForCausalLM, config, tokenizer, seed=seed)


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


def _save(folder: Path, cls: type[PreTrainedModel], config: Any, tokenizer: Any, *, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = cls(config)
        with torch.no_grad():
            # Every weight moved, so that no zero or one of the initialisation hides a term.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with no_progress_bars(transformers_logging):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    """Byte-level BPE without merges: a token a byte, so that every text has one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens(list(_WORDS))
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
