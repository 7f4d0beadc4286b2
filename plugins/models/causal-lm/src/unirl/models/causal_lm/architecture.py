"""From the checkpoint's architecture to a class of transformers whose forward can end in log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from unirl.core.errors import RecipeError
from unirl.numerics.tokens.causal_lm_files import architectures
from unirl.numerics.tokens.token_scores import TokenScores

__all__ = ["scoring_class"]


def scoring_class(folder: Path, *, trust_remote_code: bool) -> Any:
    """The class that transformers loads the checkpoint with, `TokenScores` mixed in.

    Raises RecipeError, key `model.path`, for an architecture that is no causal language model, and, key
    `model.trust_remote_code`, for one whose code only the checkpoint has.
    """
    named = architectures(folder)
    mapped: dict[str, str] = json.loads((folder / "config.json").read_text("utf-8")).get("auto_map") or {}
    own = mapped.get("AutoModelForCausalLM", "")
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        found: Any = AutoModelForCausalLM._model_mapping.get(type(settings), None)  # pyright: ignore[reportPrivateUsage]
    except (ValueError, KeyError, OSError) as error:
        if own and not trust_remote_code:
            raise RecipeError(
                f"model.trust_remote_code: got false, but the architecture {named} of {str(folder)!r} is not one of "
                f"transformers; the checkpoint brings {own.split('--')[-1]!r}. Read that code, then set it to true."
            ) from error
        raise RecipeError(
            f"model.path: transformers does not know the model in {str(folder)!r} ({named}): {error}"
        ) from error
    candidates: list[Any] = [*found] if isinstance(found, (list, tuple)) else [found] if found else []
    if own and trust_remote_code and not candidates:
        candidates = [get_class_from_dynamic_module(own, folder, local_files_only=True)]
    loads = next((one for one in candidates if one.__name__ in named), None)
    if loads is None or loads.__name__.endswith("ForConditionalGeneration"):
        raise RecipeError(
            f"model.path: {str(folder)!r} is a checkpoint of {named}, expected a causal language model without other "
            f"inputs than text, such as LlamaForCausalLM{_instead(candidates)}. Choose such a checkpoint, or the model "
            "plugin of that architecture."
        )
    # In the module of the class: transformers converts the weights of its own classes alone.
    return type(loads.__name__, (TokenScores, loads), {"__module__": loads.__module__, "__doc__": loads.__doc__})


def _instead(candidates: list[Any]) -> str:
    return f", or here {candidates[0].__name__}" if candidates else ""
