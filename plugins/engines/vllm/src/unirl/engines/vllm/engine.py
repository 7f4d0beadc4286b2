"""vLLM as the program of a `HostedTextEngine`."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.roles import Model
from unirl.numerics.received_text import received_track
from unirl.runtime.engine_host.checkpoint_folder import transformers_folder
from unirl.runtime.engine_host.program import dtype_of, program
from unirl.runtime.engine_host.text_engine import HostedTextEngine

from .config import VllmConfig
from .environment import PRODUCT
from .settings import CPU_VARIABLES, llm_arguments, sampling_arguments, variables

__all__ = ["build"]


def build(config: VllmConfig, *, model: Model, device: Any) -> HostedTextEngine:
    """Start vLLM with the checkpoint that `model` was loaded from.

    Raises RecipeError for a setting that cannot be, and RunFailed when the environment is missing or of another
    version of vLLM, or when vLLM does not start.
    """
    device = torch.device(device)
    arguments = llm_arguments(
        config,
        folder=transformers_folder(PRODUCT, config, model),
        dtype=dtype_of(config, model),
        on_cpu=device.type == "cpu",
    )
    return HostedTextEngine(
        PRODUCT,
        config,
        model=model,
        program=program(PRODUCT, config, device, variables=variables(config), cpu_variables=CPU_VARIABLES),
        arguments=arguments,
        sampling=sampling_arguments,
        track=received_track,
    )
