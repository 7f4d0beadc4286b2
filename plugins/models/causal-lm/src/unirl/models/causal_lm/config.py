"""Settings of the generic language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.model_host.tokens.causal_lm_config import CausalLmConfig

__all__ = ["AutoCausalLmConfig"]


@dataclass
class AutoCausalLmConfig(CausalLmConfig):
    trust_remote_code: bool = False
    """Run the Python code that a checkpoint brings for its architecture, config and tokenizer. Read it first: it can do
    what you can."""

    def named_code(self) -> Mapping[str, str | Path]:
        return {".trust_remote_code": f"the Python files of {self.path!r}"} if self.trust_remote_code else {}
