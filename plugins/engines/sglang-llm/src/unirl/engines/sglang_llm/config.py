"""What a recipe can set of the sglang-llm engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.hosted_text import HostedTextConfig

__all__ = ["SglangConfig"]


@dataclass
class SglangConfig(HostedTextConfig):
    attention: str = ""
    """SGLang's name of the attention kernels, such as `fa3`, `flashinfer` or `triton`; empty is SGLang's choice, on a
    CPU `torch_native`."""
    port: int = 0
    """TCP port of this machine on which SGLang's processes find each other; 0 takes a free one."""
