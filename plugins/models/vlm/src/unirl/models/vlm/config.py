"""Settings of the generic vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.model_host.tokens.image_lm_config import ImageLmConfig

__all__ = ["VlmConfig"]


@dataclass
class VlmConfig(ImageLmConfig):
    trust_remote_code: bool = False
    """Run the Python code that a checkpoint brings for its architecture, config and processor. Read it first: it can do
    what you can."""

    def named_code(self) -> Mapping[str, str | Path]:
        return {".trust_remote_code": f"the Python files of {self.path!r}"} if self.trust_remote_code else {}
