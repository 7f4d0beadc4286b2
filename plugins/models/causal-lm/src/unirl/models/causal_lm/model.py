"""Any `AutoModelForCausalLM` of transformers as a decoder of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.numerics.tokens.causal_lm import CausalLmModel
from unirl.numerics.tokens.causal_lm_files import find

from .architecture import scoring_class
from .config import AutoCausalLmConfig
from .plugin import SPEC
from .verify import VERIFIED, verify

__all__ = ["AutoCausalLm", "build"]


class AutoCausalLm(CausalLmModel):
    """A `unirl.core.roles.TextModel`."""

    example = "meta-llama/Llama-3.2-1B-Instruct"


def build(config: AutoCausalLmConfig, *, device: Any, lazy: bool = False) -> AutoCausalLm:
    """The language model of a checkpoint, after a comparison with its own forward, see `verify`.

    Raises RecipeError when the checkpoint or a setting is wrong, and for an architecture that cannot be trained here.
    """
    folder = find(config, example=AutoCausalLm.example)
    cls = scoring_class(folder, trust_remote_code=config.trust_remote_code)
    if lazy and cls.__name__ not in VERIFIED:
        raise RecipeError(
            f"model.path: {cls.__name__!r} was not compared with transformers by the tests of this plugin, and a model "
            f"that is built without values cannot be compared here; known are {', '.join(sorted(VERIFIED))}. Train it "
            "on one process, where it is built whole."
        )
    config = dataclasses.replace(config, path=str(folder))
    model = AutoCausalLm(config, device=torch.device(device), lazy=lazy, spec=SPEC, cls=cls)
    if not lazy:
        verify(model)
    return model
