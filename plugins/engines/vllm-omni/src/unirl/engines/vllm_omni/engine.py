"""The engine: requests go to vLLM-Omni as they are, trajectories come back with the log-probs of the policy that
sampled."""

from __future__ import annotations

from typing import Any, cast

import torch
from unirl.core.roles import DiffusionModel, Model
from unirl.numerics.probe import probe_request
from unirl.runtime.engine_host.checkpoint_folder import diffusers_folder
from unirl.runtime.engine_host.hosted import Hosting
from unirl.runtime.engine_host.latent_engine import HostedLatentEngine, fitting_bridge
from unirl.runtime.engine_host.program import dtype_of, program

from .bridge import Bridge
from .config import VllmOmniConfig
from .environment import PRODUCT
from .plugin import SPEC
from .settings import cpu_variables, omni_arguments, variables

__all__ = ["build"]

MOST_RANK = 512
"""Largest rank of an adapter that vLLM has buffers for."""


def build(config: VllmOmniConfig, *, model: Model, device: Any) -> HostedLatentEngine:
    """Start vLLM-Omni with the checkpoint that `model` was loaded from.

    Raises RecipeError for a setting that cannot be or a model that is not what vLLM-Omni computes, and RunFailed when
    the environment is missing or of another version, or when vLLM-Omni does not start or does not do as it is told.
    """
    device = torch.device(device)
    name, found = fitting_bridge(model, SPEC)
    bridge: Bridge = found
    dtype = dtype_of(config, model)
    folder = diffusers_folder(PRODUCT, config, model, architecture=bridge.architecture)
    hosting = Hosting.of(
        PRODUCT,
        config,
        program=program(
            PRODUCT,
            config,
            device,
            variables=variables(config),
            cpu_variables=cpu_variables(config),
            modules=(name.partition(":")[0],),
            num_devices=config.tensor_parallel,
            sleeps_on_cpu=True,
        ),
        arguments={
            "arguments": omni_arguments(config, folder=folder, dtype=dtype, on_cpu=device.type == "cpu"),
            "bridge": name,
        },
        lora_rank=MOST_RANK,
        overwrites=True,
    )
    probe = probe_request(cast("DiffusionModel", model))
    return HostedLatentEngine(hosting, model=model, kernels=SPEC.kernels, probe=probe)
