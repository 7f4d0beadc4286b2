"""Prompts to token ids of an encoder's full length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import EncoderConfig
from .files import find_folder, load_tokenizer

__all__ = ["PromptReader", "processor_folder", "prompt_reader"]

log = logging.getLogger(__name__)


class PromptReader:
    """A tokenizer with the encoder's length. Tokens that it cuts off are reported once and counted, never silent."""

    def __init__(self, tokenizer: Any, *, max_tokens: int, reward: str) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._reward = reward
        self._is_quiet = False

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and mask, each [P, max_tokens] int64, and [P] bool: whether the prompt was cut off."""
        lengths = [len(ids) for ids in self._tokenizer(list(prompts), verbose=False)["input_ids"]]
        is_cut = torch.tensor([length > self._max_tokens for length in lengths])
        if bool(is_cut.any()) and not self._is_quiet:
            self._is_quiet = True
            row = int(is_cut.nonzero()[0])
            log.warning(
                "reward.%s: prompt %r has %d tokens, the encoder reads %d. The score ignores the rest. Reported once; "
                "the component `truncated` counts such samples.",
                self._reward,
                prompts[row],
                lengths[row],
                self._max_tokens,
            )
        encoded = self._tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=self._max_tokens,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return encoded["input_ids"], encoded["attention_mask"], is_cut


def prompt_reader(folder: Path, *, max_tokens: int, reward: str) -> PromptReader:
    """With the tokenizer in a folder. Raises RecipeError where there is none."""
    return PromptReader(load_tokenizer(folder, key=f"reward.{reward}.processor"), max_tokens=max_tokens, reward=reward)


def processor_folder(config: EncoderConfig, folder: Path, *, reward: str) -> Path:
    """Folder of the tokenizer and `preprocessor_config.json`. folder: of the checkpoint, used where none is set."""
    if not config.processor:
        return folder
    files = ("*.json", "*.txt", "*.model")
    return find_folder(
        config.processor, key=f"reward.{reward}.processor", example="openai/clip-vit-large-patch14", files=files
    )
