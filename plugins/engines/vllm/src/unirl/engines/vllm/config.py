"""What a recipe can set of the vllm engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.hosted_text import HostedTextConfig

__all__ = ["VllmConfig"]


@dataclass
class VllmConfig(HostedTextConfig):
    """What every engine for text in a process of its own has; `extra` holds arguments of `vllm.LLM`."""
