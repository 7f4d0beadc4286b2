"""What a recipe can set of the qwen3 models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.core.config import PartConfig
from unirl.core.model_files import wrong_dtypes

__all__ = ["Qwen3Config", "problems"]

ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")


@dataclass
class Qwen3Config(PartConfig):
    path: str = "???"
    """Folder in the transformers layout, or hub id such as `Qwen/Qwen3-0.6B`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    dtype: str = "float32"
    """Dtype of the weights: `float32`, `bfloat16` or `float16`. Log-probs and sampled logits are fp32 in each."""
    autocast: str | None = None
    """Run the decoder under autocast to this dtype, so that float32 weights stay as masters; None is off."""
    attention: str = "auto"
    """`sdpa`, `eager` or `flash_attention_2`; `auto` takes flash attention where it is installed and the model runs on
    a GPU in 16 bit, and sdpa elsewhere."""
    logits_chunk: int = 0
    """Tokens whose logits exist at a time while log-probs are computed; 0 takes what fits in 256 MiB. It decides
    memory, not the numbers."""


def problems(config: Qwen3Config) -> Iterator[str]:
    """What is wrong with these settings, each one sentence with the key path first."""
    for key, text in wrong_dtypes(config, "dtype", "autocast"):
        yield f"{key}: {text}"
    if config.attention not in ATTENTIONS:
        yield f"model.attention: {config.attention!r} was asked for; it is one of {', '.join(ATTENTIONS)}."
    if config.logits_chunk < 0:
        yield f"model.logits_chunk: {config.logits_chunk} was asked for; it must be 0 or more."
