"""Config of the vllm engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.engine_host.text_config import ExternalTextConfig

__all__ = ["VllmConfig"]


@dataclass
class VllmConfig(ExternalTextConfig):
    """Settings of all external text engines; `extra` holds arguments of `vllm.LLM`."""
