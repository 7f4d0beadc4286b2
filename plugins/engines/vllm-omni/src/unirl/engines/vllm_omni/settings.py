"""Maps settings of a recipe to vLLM-Omni's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.core.types.request import TextRequest
from unirl.engine_host.program import refuse_extra

from .config import VllmOmniConfig

__all__ = ["cpu_variables", "omni_arguments", "text_arguments", "variables"]


def cpu_variables(config: VllmOmniConfig) -> Mapping[str, str]:
    """Environment variables on a CPU."""
    return {
        # Cores are shared with training; by default vLLM pins its threads to them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",
        "UNIRL_VLLM_OMNI_CPU_DEVICES": str(config.tensor_parallel),
    }


def variables(config: VllmOmniConfig) -> Mapping[str, str]:
    """Environment variables everywhere."""
    return {"VLLM_LOGGING_LEVEL": config.log_level, "VLLM_NO_USAGE_STATS": "1"}


def omni_arguments(config: VllmOmniConfig, *, folder: Path, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `AsyncOmni`. Raises RecipeError for one in `engine.extra` that has its own key or is unsupported."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_num_seqs,
        "request_batch_max_wait_ms": config.batch_wait_ms,
        "enforce_eager": config.enforce_eager or on_cpu,
    }
    if config.step_batching:
        arguments["step_execution"] = True
    if config.cached_prompts:
        arguments |= {"enable_prompt_embed_cache": True, "prompt_embed_cache_size": config.cached_prompts}
    if config.sleep_mode:
        arguments["enable_sleep_mode"] = True
    if config.tensor_parallel > 1:
        arguments |= {
            "num_gpus": config.tensor_parallel,
            "parallel_config": {"tensor_parallel_size": config.tensor_parallel},
            "distributed_executor_backend": "mp",
        }
    refuse_extra(config, arguments)
    return {**arguments, **config.extra}


def text_arguments(wanted: TextRequest, *, batch: int) -> Mapping[str, Any]:
    """Settings of completions, see `unirl.engines.vllm_omni.texts`. batch: completions generated together."""
    sampling = wanted.sampling
    names = ("temperature", "top_p", "top_k", "max_new_tokens", "stop")
    return {
        "config": {name: getattr(sampling, name) for name in names},
        "stop_tokens": list(wanted.stop_tokens),
        "options": dict(wanted.options),
        "length": wanted.length,
        "batch": batch,
    }
