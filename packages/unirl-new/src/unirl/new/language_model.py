"""A plugin for a language model in the transformers layout: a thin name over the shared classes, with its facts."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.new.generic import build_generic, checkpoint_license, outside_requirements, readable
from unirl.new.kinds import Shape
from unirl.new.miniature import LEVELS, names_below, write_language_model
from unirl.new.names import Names
from unirl.new.render import render
from unirl.new.trials import idle_text_layers

__all__ = ["files"]

_PARTS = ("unirl-engine-trainside", "unirl-backend-fsdp2", "unirl-algo-grpo")


def files(folder: Path, names: Names, *, generic: str, catalog: Catalog, author: str) -> dict[str, str | bytes]:
    """See `from_checkpoint.files_from`."""
    from unirl.model_host.module_names import attention_layers
    from unirl.model_host.tokens.image_miniature import media

    model = build_generic(folder, generic, catalog=catalog)
    spec: Any = catalog.get("model", generic).spec
    images = generic == "vlm"
    architecture = type(model.causal_lm).__name__
    if not hasattr(import_module("transformers"), architecture):
        raise RecipeError(
            f"--from: transformers has no class {architecture!r}; a plugin is written for its architectures alone."
        )
    with tempfile.TemporaryDirectory() as scratch:
        miniature, small, level = _miniature(folder, Path(scratch), generic, architecture, catalog)
        lazy = _is_built_lazily(Path(scratch) / f"{level}-whole", generic, catalog)
        find = catalog.resolve(spec.lora_targets)
        shown = media(Path(scratch), number=0) if images else ()
        idle = idle_text_layers(small, find, chat=model.tokenizer.chat_template is not None, media=shown)
    blocks: tuple[str, ...] = catalog.resolve(spec.wrap_blocks)(model.trainable)
    targets = attention_layers(model.trainable)
    settings = model.causal_lm.config.get_text_config()
    stops = [repr(model.tokenizer.decode([token])) for token in model.stop_tokens]
    facts: dict[str, Any] = {
        "architecture": architecture,
        "images": images,
        "generic": generic,
        "auto": "AutoModelForImageTextToText" if images else "AutoModelForCausalLM",
        "summary": f"{architecture}: {'text about images' if images else 'text'}, from a checkpoint of transformers",
        "example": type(model).example,
        "renames": list(type(model).renames.items()) if lazy else [],
        "lazy": lazy,
        "lora_targets": targets,
        "lora_layers": _num_adapted(small, find),
        "idle_layers": idle,
        "lora_text": ", ".join(f"`{name}`" for name in targets) or "nothing: no attention was recognised by its name",
        "wrap_blocks": blocks,
        "block_text": ", ".join(f"`{name}`" for name in blocks) or "none",
        "num_blocks": sum(type(part).__name__ in blocks for part in small.trainable.modules()),
        "has_chat": model.tokenizer.chat_template is not None,
        "parameters": readable(sum(parameter.numel() for parameter in model.trainable.parameters())),
        "num_layers": settings.num_hidden_layers,
        "vocabulary": len(model.tokenizer),
        "stop_text": " or ".join(f"`{stop}`" for stop in stops),
        "pad_text": repr(model.tokenizer.decode([model.pad_token])),
        "license": checkpoint_license(folder),
        "miniature_size": readable(sum(parameter.numel() for parameter in small.trainable.parameters())),
        "miniature_text": ""
        if level == LEVELS[0]
        else "It has the widths of the checkpoint: with smaller ones this "
        "architecture could not be built; change them in its `config.json`.",
    }
    shape = Shape(
        prefix="model",
        description="The model {name} for UniRL: " + f"{architecture} of transformers",
        modules=("model", "tiny"),
        requires=("unirl-core", "unirl-model-host", "unirl-numerics", *outside_requirements(generic, catalog=catalog)),
        proves_with=_PARTS,
    )
    written = render(names, author=author, templates="language_model", shape=shape, facts=facts)
    placed = {f"src/{names.package}/miniature/{name}": content for name, content in miniature.items()}
    return dict(sorted({**written, **placed}.items()))


def _miniature(
    folder: Path, scratch: Path, generic: str, architecture: str, catalog: Catalog
) -> tuple[dict[str, bytes], Any, str]:
    """Files of the miniature, the model that the generic plugin builds on it, and the level of its sizes."""
    from unirl.model_host.tokens.miniature import save_random_weights

    reasons: list[str] = []
    for level in LEVELS:
        place, whole = scratch / level, scratch / f"{level}-whole"
        write_language_model(folder, place, level=level)
        copytree(place, whole)
        try:
            save_random_weights(whole, getattr(import_module("transformers"), architecture), seed=0)
            small = build_generic(whole, generic, catalog=catalog)
        except (RecipeError, ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            reasons.append(f"with smaller {level}: {type(error).__name__}: {error}")
            continue
        return {name: (place / name).read_bytes() for name in names_below(place)}, small, level
    raise RecipeError(
        f"--from: a miniature of {architecture} cannot be made from its config.json ({'; '.join(reasons)}). Scaffold "
        f"with `unirl new model NAME` and write tiny.py by hand; model={generic} trains the checkpoint."
    )


def _is_built_lazily(folder: Path, generic: str, catalog: Catalog) -> bool:
    """Whether the generic model builds this architecture without values: it does for those that its tests compare."""
    try:
        build_generic(folder, generic, catalog=catalog, lazy=True)
    except RecipeError:
        return False
    return True


def _num_adapted(model: Any, find: Any) -> int:
    """Linear layers of a model that LoRA adapts."""
    import torch

    ends: tuple[str, ...] = find(model.trainable)
    named = [name for name, part in model.trainable.named_modules() if isinstance(part, torch.nn.Linear)]
    return sum(any(name == end or name.endswith(f".{end}") for end in ends) for name in named)
