"""Config of the trainside engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.core.specs.config import PartConfig

__all__ = ["TrainsideConfig"]


@dataclass
class TrainsideConfig(PartConfig):
    forward_batch: int = limit(0, least=0)
    """Batch size for denoising and decoding, or for generating completions; 0 takes the whole request. Guidance doubles
    a forward's rows."""
    cached_prompts: int = limit(512, least=0)
    """Number of prompts whose embeddings are cached in host memory between steps (LRU); 0 disables the cache. SD3.5
    with 256 T5 tokens takes 2.7 MB per prompt in bfloat16."""
