"""Qwen3 as a decoder of tokens, on transformers' own classes.

Source: Qwen3, arXiv 2505.09388; verified against transformers' `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from typing import Any

import torch
from unirl.model_host.tokens.causal_lm import CausalLmModel

from .causal_lm import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from .config import Qwen3Config
from .plugin import MOE, SPEC

__all__ = ["Qwen3Model", "build", "build_moe"]

_ARCHITECTURES = {Qwen3ForCausalLM.__name__: SPEC.name, Qwen3MoeForCausalLM.__name__: MOE.name}


class Qwen3Model(CausalLmModel):
    """A `unirl.core.roles.TextModel`."""

    example = "Qwen/Qwen3-0.6B"


def build(config: Qwen3Config, *, device: Any, lazy: bool = False) -> Qwen3Model:
    """A dense Qwen3. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Qwen3Model(
        config, device=torch.device(device), lazy=lazy, spec=SPEC, cls=Qwen3ForCausalLM, siblings=_ARCHITECTURES
    )


def build_moe(config: Qwen3Config, *, device: Any, lazy: bool = False) -> Qwen3Model:
    """A Qwen3 with a mixture of experts. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Qwen3Model(
        config, device=torch.device(device), lazy=lazy, spec=MOE, cls=Qwen3MoeForCausalLM, siblings=_ARCHITECTURES
    )
