"""Maps settings of a recipe to SGLang's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.engine_host.program import refuse_extra

from .bridge import Bridge
from .config import SglangConfig
from .control import MODEL_ID

__all__ = ["CPU_VARIABLES", "EAGER", "server_arguments"]

EAGER = {"TORCH_COMPILE_DISABLE": "1"}
"""SGLang compiles layers that have had an adapter, whatever its settings."""
CPU_VARIABLES = {"SGLANG_PLATFORM": "unirl-cpu", **EAGER}
"""Names the platform of `unirl.engine_cpu`'s `sglang-platform`."""
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OF_THE_ENGINE = (
    "batching_max_size",
    "cache_strategy",
    "cfg_parallel_size",
    "dp_size",
    "enable_cache_dit",
    "enable_cfg_parallel",
    "lora_alpha",
    "lora_nickname",
    "lora_path",
    "lora_scale",
    "lora_target_modules",
    "model_id",
    "model_paths",
    "nnodes",
    "pipeline_class_name",
    "quantization",
    "ring_degree",
    "sp_degree",
    "tp_size",
    "ulysses_degree",
)
"""Settings of `ServerArgs` that change the computation, the splitting of requests or the weight layout, which this
engine could not verify."""


def server_arguments(
    config: SglangConfig, *, folder: Path, dtype: torch.dtype, bridge: Bridge, on_cpu: bool
) -> Mapping[str, Any]:
    """Settings of SGLang's `ServerArgs`. Raises RecipeError for one in `engine.extra` that has its own key or is
    unsupported."""
    precision = PRECISIONS[dtype]
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "model_id": MODEL_ID,
        # Otherwise SGLang falls back to plain diffusers for models that it cannot load.
        "backend": "sglang",
        "num_gpus": 1,
        "dit_precision": precision,
        "vae_precision": precision,
        "text_encoder_precisions": [precision] * bridge.num_encoders,
        "warmup_mode": "off",
        # Otherwise it would keep a core busy between rollouts, which training needs.
        "sleep_on_idle": True,
        # Offloaded weights could not be compared with those sent.
        "dit_cpu_offload": False,
        "dit_layerwise_offload": False,
        "text_encoder_cpu_offload": False,
        "image_encoder_cpu_offload": False,
        "vae_cpu_offload": False,
        "use_fsdp_inference": False,
        # Merged into one product, as in training.
        "lora_merge_mode": "merge",
        "enable_torch_compile": not (config.enforce_eager or on_cpu),
        "log_level": config.log_level.lower(),
    }
    if config.port:
        arguments["scheduler_port"] = config.port
    refuse_extra(config, arguments, OF_THE_ENGINE)
    return {**arguments, **config.extra}
