"""The engine: sends requests to SGLang unchanged, and receives trajectories with the sampling policy's log-probs."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.roles import DiffusionModel
from unirl.engine_host.checkpoint_folder import diffusers_folder
from unirl.engine_host.external import Hosting
from unirl.engine_host.latent_engine import ExternalLatentEngine, fitting_bridge
from unirl.engine_host.probe import probe_requests
from unirl.engine_host.program import dtype_of, program

from .bridge import Bridge
from .config import SglangConfig
from .environment import PRODUCT
from .plugin import SPEC
from .settings import CPU_VARIABLES, server_arguments, variables

__all__ = ["build"]

MOST_RANK = 2**16
"""Adapters of any rank: SGLang merges them into the weights."""


def build(config: SglangConfig, *, model: DiffusionModel, device: Any) -> ExternalLatentEngine:
    """Start SGLang with the checkpoint of `model`.

    Raises RecipeError for an invalid setting or a model SGLang computes differently, RunFailed when the environment is
    missing or has an untested version, or when SGLang does not start or fails the probe request.
    """
    device = torch.device(device)
    name, result = fitting_bridge(model, SPEC)
    bridge: Bridge = result
    settings = bridge.settings(model) if model.spec.reads_media("latent") else {}
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
            cpu_variables=CPU_VARIABLES,
            modules=(name.partition(":")[0],),
            sleeps_on_cpu=True,
        ),
        arguments={
            "arguments": server_arguments(
                config, folder=folder, dtype=dtype, bridge=bridge, on_cpu=device.type == "cpu"
            ),
            "bridge": name,
            "settings": settings,
            "max_rows": min(config.max_num_seqs, settings.get("max_rows", config.max_num_seqs)),
        },
        lora_rank=MOST_RANK,
        overwrites=True,
    )
    return ExternalLatentEngine(hosting, model=model, kernels=SPEC.kernels, probes=probe_requests(model))
