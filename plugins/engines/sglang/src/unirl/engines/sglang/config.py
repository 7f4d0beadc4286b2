"""Config of the sglang engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.engine_host.config import ExternalConfig

__all__ = ["SglangConfig"]


@dataclass
class SglangConfig(ExternalConfig):
    """Settings of all external engines plus these; `extra` holds arguments of SGLang's `ServerArgs`."""

    max_num_seqs: int = limit(8, least=1)
    """Maximum number of samples of one prompt denoised and decoded together."""
    port: int = limit(0, least=0, most=65_535)
    """TCP port for the rendezvous of SGLang's processes; 0 picks a free one."""

    rounding_only = ("max_num_seqs",)
