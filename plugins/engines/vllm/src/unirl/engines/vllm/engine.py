"""vLLM as the program of an `ExternalTextEngine`."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.plugins.bridges import import_bridge
from unirl.core.roles import TextModel
from unirl.engine_host.checkpoint_folder import transformers_folder
from unirl.engine_host.program import dtype_of, program
from unirl.engine_host.received_text import received_track
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.numerics.tokens.rollout import text_conditions

from .bridge import Bridge
from .config import VllmConfig
from .environment import PRODUCT
from .plugin import SPEC
from .settings import CPU_VARIABLES, check_split, llm_arguments, sampling_arguments, variables

__all__ = ["build"]


def build(config: VllmConfig, *, model: TextModel, device: Any) -> ExternalTextEngine:
    """Start vLLM with the checkpoint of `model`.

    Raises RecipeError for an invalid setting, RunFailed when the environment is missing or has an untested version
    of vLLM, or when vLLM does not start.
    """
    device = torch.device(device)
    bridge: Bridge | None = import_bridge(model.spec, SPEC) if SPEC.name in model.spec.bridges else None
    folder = transformers_folder(PRODUCT, config, model) if bridge is None else bridge.checkpoint(model, config.path)
    check_split(config, folder)
    arguments = llm_arguments(
        config,
        folder=folder,
        dtype=dtype_of(config, model),
        on_cpu=device.type == "cpu",
        reads_media=model.spec.reads_media("text") and SPEC.name not in model.spec.text_alone,
        bridged={} if bridge is None else bridge.arguments(folder),
    )
    return ExternalTextEngine(
        PRODUCT,
        config,
        model=model,
        program=program(
            PRODUCT,
            config,
            device,
            variables=variables(config),
            cpu_variables=CPU_VARIABLES,
            num_devices=config.tensor_parallel,
            sleeps_on_cpu=True,
        ),
        arguments=arguments,
        sampling=sampling_arguments,
        conditions=text_conditions,
        track=received_track,
        **({} if bridge is None else {"leaves_out": bridge.leaves_out}),
    )
