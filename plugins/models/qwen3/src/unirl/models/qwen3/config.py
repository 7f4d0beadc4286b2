"""Settings of the qwen3 models."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.tokens.causal_lm_config import CausalLmConfig

__all__ = ["Qwen3Config"]


@dataclass
class Qwen3Config(CausalLmConfig):
    """Settings of every language model in the transformers layout."""
