"""Config of the sglang-llm engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.engine_host.text_config import ExternalTextConfig

__all__ = ["SglangConfig"]


@dataclass
class SglangConfig(ExternalTextConfig):
    attention: str = ""
    """SGLang's attention backend, such as `fa3`, `flashinfer` or `triton`; empty leaves the choice to SGLang, or
    `torch_native` on a CPU."""
