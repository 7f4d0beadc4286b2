"""Bridges: adapters between a model and an engine with its own implementation of the model's pipeline.

A bridge belongs to one engine and one model, and is part of the model's plugin: condition names, packing of latents,
weight names, and where the engine keeps the values to echo. `ModelSpec.bridges` names it; only the engine imports it,
and only when both are chosen. The engine defines and documents the interface.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from ..errors import PluginBroken
from ..specs.spec import EngineSpec, ModelSpec

__all__ = ["bridge_name", "import_bridge", "lacks_bridge"]


def bridge_name(model: ModelSpec, engine: EngineSpec) -> str:
    """`"module:attribute"` of the bridge between the two. `match` refuses pairs that lack a required bridge."""
    assert engine.name in model.bridges, f"{model.name} x {engine.name} was not matched"
    return model.bridges[engine.name]


def import_bridge(model: ModelSpec, engine: EngineSpec) -> Any:
    """The imported bridge. Raises PluginBroken when its module cannot be imported or does not define it."""
    name = bridge_name(model, engine)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginBroken(f"model {model.name!r} names {name!r} as its bridge to {engine.name!r}: {error}") from error


def lacks_bridge(
    model: ModelSpec, engine: EngineSpec, *, bridged: Collection[str] = (), kinds: Collection[str] = ()
) -> str:
    """Why an engine cannot run a model for lack of a bridge, or empty. bridged: models that have one.  kinds: of the
    tracks that it is to generate."""
    if not engine.needs_bridge:
        return ""
    if engine.name in model.bridges:
        if "text" not in kinds or engine.name in model.bridged_texts:
            return ""
        return (
            f"the bridge of model {model.name!r} to engine {engine.name!r} serves its latent tracks, not its text "
            "tracks. Choose another engine for them, such as trainside."
        )
    others = f"; of those installed, {', '.join(bridged)} {'does' if len(bridged) == 1 else 'do'}" if bridged else ""
    return (
        f"engine {engine.name!r} needs a bridge to the model, and model {model.name!r} has none for it{others}. "
        "Choose another model or another engine."
    )
