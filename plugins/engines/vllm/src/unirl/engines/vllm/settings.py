"""The settings of a recipe and of a request in vLLM's words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.request import TextRequest
from unirl.core.roles import Model
from unirl.runtime.engine_host.process import Program

from .config import VllmConfig
from .environment import ENVIRONMENT

__all__ = ["checkpoint_folder", "dtype_of", "llm_arguments", "program", "sampling_arguments"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
CPU_CACHE_MB = 1024
OF_OTHER_KEYS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization")
"""Arguments of `vllm.LLM` that change how weights are held, which this engine could then neither load nor check."""


def checkpoint_folder(config: VllmConfig, model: Model) -> Path:
    """The folder that vLLM loads: `engine.path`, else that of the model that trains. Raises RecipeError without one."""
    # transformers notes on a module where its weights came from.
    found = config.path or str(getattr(model.trainable, "name_or_path", ""))
    folder = Path(found).expanduser()
    if found and (folder / "config.json").is_file():
        return folder.resolve()
    raise RecipeError(
        f"engine.path: vLLM loads a checkpoint from a folder in the transformers layout; {found!r} is none. Give "
        "engine.path."
    )


def dtype_of(config: VllmConfig, model: Model) -> torch.dtype:
    """The dtype that vLLM is to hold. Raises RecipeError for a name that it does not take."""
    if config.dtype == "auto":
        return next(iter(model.trainable.parameters())).dtype
    if config.dtype not in DTYPES:
        raise RecipeError(f"engine.dtype: {config.dtype!r} was asked for; it is auto or one of {', '.join(DTYPES)}.")
    return DTYPES[config.dtype]


def program(config: VllmConfig, device: torch.device) -> Program:
    """The process. Raises RecipeError for a device that vLLM has no lock for, RunFailed without the environment."""
    within = Path(config.env_dir).expanduser() if config.env_dir else None
    if config.log_level not in LOG_LEVELS:
        raise RecipeError(f"engine.log_level: {config.log_level!r} was asked for; one of {', '.join(LOG_LEVELS)}.")
    if config.sleep_mode and device.type != "cuda":
        raise RecipeError(
            f"engine.sleep_mode: vLLM gives memory back on CUDA alone; this is {device.type!r}. Unset it."
        )
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": config.log_level,
        "PYTHONUNBUFFERED": "1",
    }
    if device.type == "cpu":
        # Cores are shared with training: vLLM would bind its threads to them.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1"}
    elif device.index is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        variables["CUDA_VISIBLE_DEVICES"] = visible[device.index] if visible != [""] else str(device.index)
    return Program(
        name="vllm",
        python=ENVIRONMENT.interpreter(device.type, within=within),
        serve=ENVIRONMENT.serve,
        modules=ENVIRONMENT.modules,
        variables=variables,
        log=Path(config.log_file).expanduser() if config.log_file else None,
        start_timeout_s=config.start_timeout_s,
    )


def llm_arguments(config: VllmConfig, *, folder: Path, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. Raises RecipeError for one in `engine.extra` that has a key or cannot be."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager or on_cpu,
        "enable_prefix_caching": config.prefix_caching,
        "seed": config.seed,
        # Log-probs under the tempered distribution that tokens are drawn from.
        "logprobs_mode": "processed_logprobs",
        # Settings in the checkpoint's generation_config.json are no part of the request.
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if on_cpu:
        # A prompt that is computed in pieces draws at the end of each, and vLLM takes the draw back by the generator's
        # offset, which torch has on CUDA alone.
        arguments["enable_chunked_prefill"] = False
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_cache_mb or on_cpu:
        arguments["kv_cache_memory_bytes"] = (config.kv_cache_mb or CPU_CACHE_MB) * 2**20
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory
    if config.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(config.lora_rank)}
    if config.sleep_mode:
        arguments["enable_sleep_mode"] = True
    for key in config.extra:
        if key in arguments or key in OF_OTHER_KEYS:
            why = "another key of `engine` stands for it" if key in arguments else "one GPU and plain weights are taken"
            raise RecipeError(f"engine.extra.{key}: it cannot be given; {why}. Leave it out.")
    return {**arguments, **config.extra}


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for its `max_lora_rank`."""


def _lora_rank(rank: int) -> int:
    fitting = [most for most in LORA_RANKS if most >= rank]
    if not fitting:
        raise RecipeError(
            f"engine.lora_rank: {rank} was asked for; vLLM takes adapters of rank {LORA_RANKS[-1]} at most."
        )
    return fitting[0]


def sampling_arguments(wanted: TextRequest) -> Mapping[str, Any]:
    """Arguments of `vllm.SamplingParams` that all samples share."""
    sampling = wanted.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(wanted.stop_tokens),
        # The request names every token that ends a text; the checkpoint's own would come on top.
        "ignore_eos": True,
        "stop": list(sampling.stop),
        "skip_special_tokens": True,
        "detokenize": bool(sampling.stop),
        # Of the token that was drawn, and of no others.
        "logprobs": 0,
    }
