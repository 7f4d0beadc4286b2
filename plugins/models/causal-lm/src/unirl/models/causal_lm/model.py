"""Any `AutoModelForCausalLM` of transformers as a decoder of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.model_host.tokens.causal_lm import CausalLmModel
from unirl.model_host.tokens.causal_lm_files import find
from unirl.model_host.tokens.scoring_class import scoring_class
from unirl.model_host.tokens.verify import verify

from .config import AutoCausalLmConfig
from .plugin import SPEC

__all__ = ["VERIFIED", "AutoCausalLm", "build"]

VERIFIED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Cohere2", "DeepseekV3", "Gemma", "Gemma3", "Glm4", "Granite", "Lfm2", "Llama", "Mistral", "Olmo2", "Phi",
        "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SmolLM3",
    )
)  # fmt: skip
"""Architectures that the tests compare with transformers: log-probs, gradients, greedy texts, adapters, and a build
without values."""


class AutoCausalLm(CausalLmModel):
    """A `unirl.core.roles.TextModel`."""

    example = "meta-llama/Llama-3.2-1B-Instruct"


def build(config: AutoCausalLmConfig, *, device: Any, lazy: bool = False) -> AutoCausalLm:
    """The language model of a checkpoint, after a comparison with its own forward, see `verify`.

    Raises RecipeError when the checkpoint or a setting is wrong, and for an architecture that cannot be trained here.
    """
    folder = find(config, example=AutoCausalLm.example)
    cls = scoring_class(folder, auto="AutoModelForCausalLM", trust_remote_code=config.trust_remote_code)
    if lazy and cls.__name__ not in VERIFIED:
        raise RecipeError(
            f"model.path: {cls.__name__!r} was not compared with transformers by the tests of this plugin, and a model "
            f"that is built without values cannot be compared here; known are {', '.join(sorted(VERIFIED))}. Train it "
            "on one process, where it is built whole."
        )
    config = dataclasses.replace(config, path=str(folder))
    model = AutoCausalLm(
        config,
        device=torch.device(device),
        lazy=lazy,
        spec=SPEC,
        cls=cls,
        trust_remote_code=config.trust_remote_code,
    )
    if not lazy:
        verify(model)
    return model
