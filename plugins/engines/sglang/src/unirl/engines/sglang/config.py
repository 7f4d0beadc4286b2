"""What a recipe can set of the sglang engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.hosted import HostedConfig

__all__ = ["SglangConfig"]


@dataclass
class SglangConfig(HostedConfig):
    """What every engine in a process of its own has, and this; `extra` holds arguments of SGLang's `ServerArgs`."""

    max_num_seqs: int = 8
    """Samples of one prompt at most that are denoised and decoded together."""
    port: int = 0
    """TCP port of this machine on which SGLang's processes find each other; 0 takes a free one."""
