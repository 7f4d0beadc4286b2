"""Settings of the generic language model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.tokens.causal_lm_config import CausalLmConfig

__all__ = ["AutoCausalLmConfig"]


@dataclass
class AutoCausalLmConfig(CausalLmConfig):
    trust_remote_code: bool = False
    """Run the Python code that a checkpoint brings for its architecture, config and tokenizer. Read it first: it can do
    what you can."""
