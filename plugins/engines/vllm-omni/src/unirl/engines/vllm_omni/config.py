"""Config of the vllm-omni engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.engine_host.config import ExternalConfig

__all__ = ["VllmOmniConfig"]


@dataclass
class VllmOmniConfig(ExternalConfig):
    """Settings of all external engines plus these; `extra` holds arguments of `vllm_omni.AsyncOmni`."""

    max_num_seqs: int = limit(8, least=1)
    """Maximum batch size for denoising and decoding. Guidance doubles a forward's rows."""
    max_num_texts: int = limit(32, least=1)
    """Maximum number of completions generated together, of models whose texts it generates."""
    batch_wait_ms: float = limit(50.0, least=0)
    """How long an incomplete batch waits for further samples."""
    step_batching: bool = False
    """Continuous batching: samples join and leave a batch between steps."""
    cached_prompts: int = limit(512, least=0)
    """Number of prompts whose embeddings are cached on the device; 0 disables the cache."""
    tensor_parallel: int = limit(1, least=1)
    """Tensor-parallel size: devices starting at the engine's, or processes on a CPU."""

    rounding_only = ("max_num_seqs", "max_num_texts")
