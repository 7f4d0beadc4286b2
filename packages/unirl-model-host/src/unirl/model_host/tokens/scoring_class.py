"""A transformers class for the checkpoint's architecture whose forward can end in log-probs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from unirl.core.errors import RecipeError

from .causal_lm_files import architectures
from .token_scores import TokenScores

__all__ = ["scoring_class"]

_EXPECTED = {
    "AutoModelForCausalLM": "a causal language model without other inputs than text, such as LlamaForCausalLM",
    "AutoModelForImageTextToText": "a language model that reads images, such as Qwen3VLForConditionalGeneration",
}


def scoring_class(
    folder: Path, *, auto: Literal["AutoModelForCausalLM", "AutoModelForImageTextToText"], trust_remote_code: bool
) -> Any:
    """The class that transformers loads the checkpoint with, `TokenScores` mixed in.

    auto: by which class of transformers.
    Raises RecipeError, key `model.path`, for an architecture that is not of that kind, and, key
    `model.trust_remote_code`, for one whose code only the checkpoint has.
    """
    transformers = import_module("transformers")
    named = architectures(folder)
    mapped: dict[str, str] = json.loads((folder / "config.json").read_text("utf-8")).get("auto_map") or {}
    own = mapped.get(auto, "")
    try:
        settings = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        mapping = getattr(transformers, auto)._model_mapping
        found: Any = mapping.get(type(settings), None)
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
        load = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
        candidates = [load(own, folder, local_files_only=True)]
    loads = next((one for one in candidates if one.__name__ in named), None)
    reads_images = loads is not None and loads.__name__.endswith("ForConditionalGeneration")
    if loads is None or (auto == "AutoModelForCausalLM" and reads_images):
        raise RecipeError(
            f"model.path: {str(folder)!r} is a checkpoint of {named}, expected {_EXPECTED[auto]}{_instead(candidates)}"
            f". Choose such a checkpoint, or {_plugin(named, auto, reads_images=reads_images)}."
        )
    # In the module of the class: transformers converts only the weights of its own classes.
    return type(loads.__name__, (TokenScores, loads), {"__module__": loads.__module__, "__doc__": loads.__doc__})


def _instead(candidates: list[Any]) -> str:
    return f", or here {candidates[0].__name__}" if candidates else ""


def _plugin(named: list[str], auto: str, *, reads_images: bool) -> str:
    if auto == "AutoModelForImageTextToText" and any(name.endswith("ForCausalLM") for name in named):
        return "model=causal-lm"
    return "model=vlm, which reads images" if reads_images else "the model plugin of that architecture"
