"""The engine: sends requests to vLLM-Omni unchanged, and receives trajectories, and texts of models that also write,
with the sampling policy's log-probs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from unirl.core.errors import PluginBroken
from unirl.core.roles import DiffusionModel, text_model
from unirl.engine_host.checkpoint_folder import diffusers_folder
from unirl.engine_host.external import Hosting
from unirl.engine_host.latent_engine import ExternalLatentEngine, fitting_bridge
from unirl.engine_host.probe import probe_requests
from unirl.engine_host.program import dtype_of, program
from unirl.engine_host.received_text import received_track
from unirl.engine_host.text_engine import ExternalTexts
from unirl.numerics.tokens.rollout import text_conditions

from .bridge import Bridge, SequenceBridge, TextBridge
from .config import VllmOmniConfig
from .environment import PRODUCT
from .plugin import SPEC
from .settings import cpu_variables, omni_arguments, text_arguments, variables

__all__ = ["build"]

MOST_RANK = 512
"""Largest LoRA rank vLLM has buffers for."""


def build(config: VllmOmniConfig, *, model: DiffusionModel, device: Any) -> ExternalLatentEngine:
    """Start vLLM-Omni with the checkpoint of `model`.

    Raises RecipeError for an invalid setting or a model vLLM-Omni computes differently, RunFailed when the environment
    is missing or has an untested version, or when vLLM-Omni does not start or fails the probe request.
    """
    device = torch.device(device)
    name, result = fitting_bridge(model, SPEC)
    bridge: Bridge = result
    dtype = dtype_of(config, model)
    writes = SPEC.name in model.spec.bridged_texts
    if writes and not isinstance(result, TextBridge):
        raise PluginBroken(
            f"model {model.spec.name!r} names {SPEC.name!r} in `bridged_texts`, and its bridge {name!r} has no "
            "`decoder` and `max_model_len`."
        )
    is_sequence = isinstance(bridge, SequenceBridge)
    if is_sequence:
        folder = bridge.checkpoint(model, config.path)
    else:
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
            "architecture": bridge.architecture,
            "folder": str(folder) if is_sequence else "",
            "settings": bridge.settings(model) if model.spec.reads_media("latent") else None,
            "writes": writes,
        },
        lora_rank=MOST_RANK,
        overwrites=True,
    )
    texts: ExternalTexts | None = None
    if writes:
        texts = ExternalTexts(
            PRODUCT,
            model=text_model(model),
            sampling=partial(text_arguments, batch=config.max_num_texts),
            conditions=text_conditions,
            track=received_track,
            limit="max_position_embeddings of the checkpoint",
        )
    return ExternalLatentEngine(hosting, model=model, kernels=SPEC.kernels, probes=probe_requests(model), texts=texts)
