"""Miniature checkpoints of language models: a tokenizer that knows every text, and random weights.

Calls transformers and tokenizers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..model_files import no_progress_bars

__all__ = ["byte_tokenizer", "save_random", "save_random_weights"]


def byte_tokenizer(
    special: Sequence[str],
    *,
    words: Sequence[str] = (),
    chat_template: str | None = None,
    known: bool = False,
    begin: str | None = None,
    end: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
) -> Any:
    """A `PreTrainedTokenizerFast` of byte-level BPE without merges: a token a byte, so that every text has one.

    special: tokens that decoding leaves out; `begin`, `end` and `pad` among them begin a text, end it and pad.
    words: further tokens, which decoding keeps.  known: whether the tokenizer names the special tokens as its own.
    """
    tokenizers = import_module("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens(list(words))
    result = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        **({"extra_special_tokens": list(special)} if known else {}),
    )
    result.chat_template = chat_template
    return result


def save_random(folder: Path, cls: Any, config: Any, tokenizer: Any, *, seed: int) -> None:
    """Write a model of random weights with its tokenizer, as `save_pretrained` does; same seed, same bytes.

    Every weight is moved, so that no zero or one of the initialisation hides a term. Texts end at the tokenizer's
    end or padding token.
    """
    model = _random(cls, config, seed=seed)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    with no_progress_bars(import_module("transformers.utils").logging):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def save_random_weights(folder: Path, cls: Any, *, seed: int) -> None:
    """Write random weights, moved as in `save_random`, into a folder that holds all other files of a checkpoint.

    cls: of transformers; its sizes are those of config.json. Same seed, same bytes.
    """
    config: Any = cls.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = _random(cls, config, seed=seed)
    if (folder / "generation_config.json").is_file():
        generation = import_module("transformers").GenerationConfig
        model.generation_config = generation.from_pretrained(folder, local_files_only=True)
    with no_progress_bars(import_module("transformers.utils").logging):
        model.save_pretrained(folder)


def _random(cls: Any, config: Any, *, seed: int) -> Any:
    # Their signatures are untyped.
    untyped: Any = torch
    with untyped.random.fork_rng(devices=[]):
        untyped.manual_seed(seed)
        model: Any = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
