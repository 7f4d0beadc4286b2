"""The settings of a recipe in vLLM-Omni's words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import Model
from unirl.runtime.engine_host.process import Program

from .bridge import Bridge
from .config import VllmOmniConfig
from .environment import ENVIRONMENT

__all__ = ["checkpoint_folder", "dtype_of", "omni_arguments", "program"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
OF_THE_ENGINE = (
    "cache_backend",
    "custom_pipeline_args",
    "diffusion_load_format",
    "lora_path",
    "parallel_config",
    "quantization_config",
    "step_execution",
    "worker_extension_cls",
)
"""Arguments of `AsyncOmni` that change what is computed or how weights are held, which this engine could not check."""


def checkpoint_folder(config: VllmOmniConfig, model: Model, bridge: Bridge) -> Path:
    """The folder that vLLM-Omni loads: `engine.path`, else that of the model that trains. Raises RecipeError when it is
    not one of the pipeline that the bridge is for."""
    # diffusers notes on a module which subfolder its weights came from.
    noted = str(getattr(getattr(model.trainable, "config", None), "_name_or_path", "") or "")
    folder = Path(config.path).expanduser() if config.path else Path(noted).parent
    index = folder / "model_index.json"
    if not ((config.path or noted) and index.is_file()):
        raise RecipeError(
            f"engine.path: vLLM-Omni loads a checkpoint from a folder in the diffusers layout; {str(folder)!r} has no "
            "model_index.json. Give engine.path."
        )
    found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if found != bridge.architecture:
        raise RecipeError(
            f"engine.path: {str(folder)!r} is a checkpoint of {found!r}; model {model.spec.name!r} is "
            f"{bridge.architecture!r} in vLLM-Omni. Give the checkpoint of the model that trains."
        )
    return folder.resolve()


def dtype_of(config: VllmOmniConfig, model: Model) -> torch.dtype:
    """The dtype that vLLM-Omni is to hold. Raises RecipeError for a name that it does not take."""
    if config.dtype == "auto":
        return next(iter(model.trainable.parameters())).dtype
    if config.dtype not in DTYPES:
        raise RecipeError(f"engine.dtype: {config.dtype!r} was asked for; it is auto or one of {', '.join(DTYPES)}.")
    return DTYPES[config.dtype]


def program(config: VllmOmniConfig, device: torch.device, *, bridge: str) -> Program:
    """The process. Raises RecipeError for a setting or a device that it does not take, RunFailed without the
    environment.

    bridge: `"module:attribute"`, whose module goes along.
    """
    within = Path(config.env_dir).expanduser() if config.env_dir else None
    if config.log_level not in LOG_LEVELS:
        raise RecipeError(f"engine.log_level: {config.log_level!r} was asked for; one of {', '.join(LOG_LEVELS)}.")
    variables = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device.type == "cpu":
        # Cores are shared with training: vLLM would bind its threads to them.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1"}
        variables["UNIRL_VLLM_OMNI_CPU_DEVICES"] = str(config.tensor_parallel)
    elif device.index is not None:
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        wanted = range(device.index, device.index + config.tensor_parallel)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[at] if visible else str(at) for at in wanted)
    return Program(
        name=ENVIRONMENT.name,
        python=ENVIRONMENT.interpreter(device.type, within=within),
        serve=ENVIRONMENT.serve,
        modules=(*ENVIRONMENT.modules, bridge.partition(":")[0]),
        variables=variables,
        log=_log(config),
        start_timeout_s=config.start_timeout_s,
    )


def _log(config: VllmOmniConfig) -> Path | None:
    # A run has put its folder in place of {run}; there is none where an engine is built by itself.
    if not config.log_file or "{run}" in config.log_file:
        return None
    named = config.log_file.replace("{part}", ENVIRONMENT.name).replace("{pid}", str(os.getpid()))
    return Path(named).expanduser()


def omni_arguments(config: VllmOmniConfig, *, folder: Path, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `AsyncOmni`. Raises RecipeError for one in `engine.extra` that has a key or cannot be."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_num_seqs,
        "request_batch_max_wait_ms": config.batch_wait_ms,
        "enforce_eager": config.enforce_eager or on_cpu,
    }
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
    for key in config.extra:
        if key in arguments or key in OF_THE_ENGINE:
            why = "another key of `engine` stands for it" if key in arguments else "its rollouts could not be checked"
            raise RecipeError(f"engine.extra.{key}: it cannot be given; {why}. Leave it out.")
    return {**arguments, **config.extra}
