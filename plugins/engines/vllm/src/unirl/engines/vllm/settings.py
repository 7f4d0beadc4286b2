"""Maps settings of a recipe and of a request to vLLM's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.types.request import TextRequest
from unirl.engine_host.program import refuse_extra
from unirl.engine_host.text_engine import CPU_CACHE_MB

from .config import VllmConfig

__all__ = ["CPU_VARIABLES", "check_split", "llm_arguments", "sampling_arguments", "variables"]

CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1"}
"""Cores are shared with training; by default vLLM pins its threads to them."""


def variables(config: VllmConfig) -> Mapping[str, str]:
    """Environment variables of vLLM."""
    mode = {"VLLM_BATCH_INVARIANT": "1"} if config.batch_invariant else {}
    return {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": config.log_level, **mode}


def check_split(config: VllmConfig, folder: Path) -> None:
    """Raise RecipeError for more ranks than the attention heads of the checkpoint divide among."""
    file = folder / "config.json"
    read = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    heads = read.get("text_config", read).get("num_attention_heads")
    if heads and heads % config.tensor_parallel:
        raise RecipeError(
            f"engine.tensor_parallel: got {config.tensor_parallel}, expected a divisor of {heads}, the number of "
            "attention heads."
        )


def llm_arguments(
    config: VllmConfig,
    *,
    folder: Path,
    dtype: torch.dtype,
    on_cpu: bool,
    reads_media: bool,
    bridged: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. Raises RecipeError for one in `engine.extra` that has its own key or is unsupported.

    bridged: those of the model's bridge.
    """
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager or on_cpu,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_prefix_caching": config.prefix_caching,
        "seed": config.seed,
        # Log-probs under the tempered distribution that tokens are sampled from.
        "logprobs_mode": "processed_logprobs",
        # Settings in the checkpoint's generation_config.json are not part of the request.
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if on_cpu:
        # Chunked prefill samples after every chunk, and vLLM undoes the sampling by resetting the generator's offset,
        # which torch supports only on CUDA.
        arguments["enable_chunked_prefill"] = False
    else:
        # Other kernels of experts reorder the weights, which could then be neither read nor compared.
        arguments["moe_backend"] = "triton"
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_cache_mb or on_cpu:
        arguments["kv_cache_memory_bytes"] = (config.kv_cache_mb or CPU_CACHE_MB) * 2**20
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory
    if config.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(config.lora_rank)}
    if reads_media:
        arguments |= {
            # Images arrive as training has them, processed: vLLM must neither normalise them again nor keep copies.
            "mm_device_do_normalize": False,
            "mm_processor_cache_gb": 0,
            "limit_mm_per_prompt": {"video": 0},
            # The encoder is run for its memory only where the KV cache takes what is left.
            "skip_mm_profiling": "kv_cache_memory_bytes" in arguments,
        }
    if config.sleep_mode and not on_cpu:
        # It allocates with CUDA's virtual memory. On a CPU the worker's extension releases the memory.
        arguments["enable_sleep_mode"] = True
    arguments |= bridged or {}
    refuse_extra(config, arguments)
    return {**arguments, **config.extra}


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""


def _lora_rank(rank: int) -> int:
    fitting = [most for most in LORA_RANKS if most >= rank]
    if not fitting:
        raise RecipeError(f"engine.lora_rank: got {rank}, expected at most {LORA_RANKS[-1]}, vLLM's largest.")
    return fitting[0]


def sampling_arguments(wanted: TextRequest) -> Mapping[str, Any]:
    """Arguments of `vllm.SamplingParams`, shared by all samples."""
    sampling = wanted.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(wanted.stop_tokens),
        # The request names all stop tokens; vLLM would add those of the checkpoint.
        "ignore_eos": True,
        "stop": list(sampling.stop),
        "skip_special_tokens": True,
        "detokenize": bool(sampling.stop),
        # Only of the sampled token.
        "logprobs": 0,
    }
