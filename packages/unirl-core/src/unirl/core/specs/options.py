"""Options: the values of an open mapping in a recipe, checked as the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from ..errors import PluginBroken
from ..limits import Reason, broken_limits
from ..names import did_you_mean
from .spec import EngineSpec, ModelSpec

__all__ = ["model_option_problems", "option_problems"]


def option_problems(
    kind: type[Any], given: Mapping[str, Any], *, key: str, names: Collection[str] | None = None
) -> list[Reason]:
    """A reason for each unknown option and for each value of another type than its field.

    kind: dataclass with the fields.  key: path of the options.  names: fields that are options; None is all of them.
    """
    # Not above: what decides whether parts go together imports this, and must stay light.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [item.name for item in dataclasses.fields(kind)] if names is None else list(names)
    typed: Any = OmegaConf.structured(kind)
    # Frozen dataclasses are read-only.
    OmegaConf.set_readonly(typed, False)
    reasons: list[Reason] = []
    for name, value in given.items():
        if name not in known:
            text = f"{kind.__name__} has no such option{did_you_mean(name, known) or '.'} It has "
            reasons.append(Reason(key=f"{key}.{name}", text=f"{text}{', '.join(sorted(known)) or 'none'}."))
            continue
        try:
            OmegaConf.update(typed, name, value)
            converted: Any = OmegaConf.to_container(typed)
        except OmegaConfBaseException:
            converted = {}
        if name not in converted or converted[name] != value:
            expected = next(item.type for item in dataclasses.fields(kind) if item.name == name)
            reasons.append(Reason(key=f"{key}.{name}", text=f"got {value!r}, expected a value of type {expected}."))
    return reasons


def model_option_problems(
    given: Mapping[str, Any], *, key: str, track: str, model: ModelSpec, engine: EngineSpec
) -> Iterator[Reason]:
    """Reasons against `sampling.options` of a track. key: of the sampling section.

    Raises PluginBroken when the spec names no dataclass.
    """
    if not given:
        return
    if track not in model.options:
        text = f"got {', '.join(sorted(given))}; model {model.name!r} has no options of track {track!r}. Remove them."
        yield Reason(key=f"{key}.options", text=text)
        return
    kind = _options_class(model, track)
    reasons = option_problems(kind, given, key=f"{key}.options")
    yield from reasons or broken_limits(kind(**given), key=f"{key}.options")
    if engine.needs_bridge:
        text = f"engine {engine.name!r} has a pipeline of its own, which takes no options of model {model.name!r}."
        yield Reason(key=f"{key}.options", text=f"{text} Remove them, or use an engine without a bridge.")


def _options_class(model: ModelSpec, track: str) -> type[Any]:
    module, _, name = model.options[track].partition(":")
    try:
        kind: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginBroken(f"model {model.name!r} names {model.options[track]!r} as its options: {error}") from error
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise PluginBroken(
            f"model {model.name!r} names {model.options[track]!r} as its options, which is no dataclass."
        )
    return kind
