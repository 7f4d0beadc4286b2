"""Maps settings of a recipe to SGLang's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.engine_host.program import refuse_extra

from .bridge import Bridge
from .config import INEXACT, SglangConfig
from .control import MODEL_ID

__all__ = ["CPU_VARIABLES", "EAGER", "server_arguments", "variables"]

EAGER = {"TORCH_COMPILE_DISABLE": "1"}
"""SGLang compiles layers that have had an adapter, whatever its settings."""
CPU_VARIABLES = {"SGLANG_PLATFORM": "unirl-cpu", **EAGER}
"""Names the platform of `unirl.engine_cpu`'s `sglang-platform`."""
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def variables(config: SglangConfig) -> Mapping[str, str]:
    """Environment variables of SGLang everywhere."""
    # Inherited otherwise: rollouts would change without a word in the recipe.
    exact = {name: "false" for name in INEXACT if name not in config.environment}
    return {**exact, **(EAGER if config.enforce_eager else {})}


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
    refuse_extra(config, arguments)
    return {**arguments, **config.extra}
