"""What a recipe can set of the trainside engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["TrainsideConfig"]


@dataclass
class TrainsideConfig(PartConfig):
    forward_batch: int = 0
    """Samples that are denoised and decoded, or texts that are generated, together; 0 takes all of a request. Guidance
    doubles a forward's rows."""
    cached_prompts: int = 512
    """Prompts whose embeddings are kept in host memory between steps, the least recently used dropped first; 0 keeps
    none. SD3.5 with 256 T5 tokens takes 2.7 MB a prompt in bfloat16."""
