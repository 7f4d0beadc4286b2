"""Config of the vllm-omni engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import FP32, Acceleration
from unirl.core.limits import limit
from unirl.engine_host.config import OTHER_LAYOUT, SPLIT, ExternalConfig

__all__ = ["VllmOmniConfig"]

_APPROXIMATE: Mapping[str, float] = {"sage_attn": math.inf, "rainfusion_attn": math.inf}
"""Attention that quantizes queries and keys, or leaves some out."""


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
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "cached_prompts": Acceleration(scope="rollout", error=FP32),
        "extra.diffusion_attention_config": Acceleration(scope="rollout", error=_APPROXIMATE),
        "extra.diffusion_kv_cache_dtype": Acceleration(scope="rollout", error=math.inf),
        "extra.vae_use_tiling": Acceleration(scope="reward", error=math.inf),
        "environment.DIFFUSION_ATTENTION_BACKEND": Acceleration(scope="rollout", error=_APPROXIMATE),
        "environment.DIFFUSION_ATTENTION_QUANT": Acceleration(scope="rollout", error=math.inf),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("extra.diffusion_load_format", "extra.quantization_config"), OTHER_LAYOUT),
        **dict.fromkeys(
            ("extra.cache_backend", "environment.DIFFUSION_CACHE_BACKEND", "environment.DIFFUSION_CACHE_ADAPTER"),
            "vLLM-Omni's caches of denoiser outputs have not been tried with rollouts",
        ),
        **dict.fromkeys(
            ("extra.custom_pipeline_args", "extra.lora_path", "extra.worker_extension_cls"),
            "this engine sets up rollouts and adapters by it",
        ),
        "extra.parallel_config": SPLIT,
        "extra.step_execution": "it is engine.step_batching",
    }
