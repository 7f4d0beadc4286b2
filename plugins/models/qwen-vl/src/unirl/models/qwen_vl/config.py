"""Settings of the Qwen-VL models."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.numerics.tokens.causal_lm_config import CausalLmConfig

__all__ = ["QwenVlConfig"]


@dataclass
class QwenVlConfig(CausalLmConfig):
    """Those of every language model in the transformers layout."""
