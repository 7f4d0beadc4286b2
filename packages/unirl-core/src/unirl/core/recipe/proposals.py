"""Settings that the algorithms of a recipe propose for `sampling`, `train`, `backend` and `advantage`.

A proposal lies above the defaults and below the values that the recipe sets for this algorithm. Values that a file set
for another algorithm, which was exchanged since, give way to it; the command line never does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..errors import PluginBroken
from ..specs.config import AdvantageConfig, TrainConfig
from ..specs.leaves import leaves
from ..specs.overrides import ValueIf, has_key
from ..specs.plan import LeftOut, Origin
from ..specs.spec import AlgorithmSpec
from .exchanged import Exchange
from .origins import Layer, Slot, trace

__all__ = ["propose"]


def propose(
    config: DictConfig,
    layers: Sequence[Layer],
    *,
    slots: Mapping[str, Slot],
    exchanged: Sequence[Exchange],
    spec_of: Callable[[str], AlgorithmSpec],
    config_class: Callable[[str, str], type[Any]],
) -> tuple[Layer, list[LeftOut]]:
    """Sets what the algorithms propose in a composed recipe. Returns the layer that they add, and what gave way.

    exchanged: algorithms that took the place of another one, and the files that were written for that one.
    Raises PluginBroken for a value of the wrong type.
    """
    origins = trace(layers)
    given = {path: value for layer in layers for path, value in layer.values.items()}
    values: dict[str, Any] = {}
    gave_way: list[LeftOut] = []
    for slot in slots.values():
        spec = spec_of(slot.name) if slot.group == "algorithm" else None
        for path, proposed in spec.proposes.items() if spec else ():
            section, _, key = path.partition(".")
            files = next((one.files for one in exchanged if one.package == slot.package), frozenset[str]())
            for at, defaults in _homes(section, slot, config=config, slots=slots, config_class=config_class):
                if isinstance(proposed, ValueIf) and not _applies(proposed, at, section, config):
                    continue
                value = proposed.value if isinstance(proposed, ValueIf) else proposed
                if not has_key(defaults, key):
                    part = f"{section} {slots[at].name!r}"
                    gave_way.append(LeftOut(path=f"{at}.{key}", value=value, file="", part=part))
                    continue
                for leaf, (new, is_named) in _expanded(key, value, defaults).items():
                    here = f"{at}.{leaf}"
                    origin = origins.get(here, Origin(source="default", detail=""))
                    set_above = {_source(f"{section}.{leaf}", origins), _source(here, origins)} - {"default", ""}
                    file = origin.detail.removesuffix(".yaml")
                    if here in values or (not is_named and not set_above):
                        continue
                    if origin.source == "recipe" and file in files:
                        if given[here] == new:
                            continue
                        part, why = f"algorithm {slot.name!r}", f"proposes {json.dumps(new)}"
                        gave_way.append(LeftOut(path=here, value=given[here], file=file, part=part, why=why))
                    elif set_above:
                        continue
                    _set(config, here, new, algorithm=slot.name)
                    values[here] = new
                    origins[here] = Origin(source="proposal", detail=slot.name)
    return Layer(values=values, origins={path: origins[path] for path in values}), gave_way


def _homes(
    section: str,
    slot: Slot,
    *,
    config: DictConfig,
    slots: Mapping[str, Slot],
    config_class: Callable[[str, str], type[Any]],
) -> Iterator[tuple[str, Any]]:
    """Key paths of a section's settings for an algorithm, each with its defaults."""
    stage = slot.package.partition(".")[2]
    own = cast("Mapping[str, Any]", config.stages).get(stage)
    if section in ("train", "advantage"):
        at = section if own is None else f"stages.{stage}.{section}"
        yield at, TrainConfig() if section == "train" else AdvantageConfig()
        return
    models = [other.package.partition(".")[2] for other in slots.values() if other.group == "model"]
    named = stage if section == "sampling" or own is None else own.model or models[0]
    for other in slots.values():
        if other.group == section and (not stage or other.package in (section, f"{section}.{named}")):
            yield other.package, config_class(section, other.name)()


def _expanded(key: str, value: Any, defaults: Any) -> dict[str, tuple[Any, bool]]:
    """Leaf -> its value, and whether the proposal names it. A mapping replaces its whole section: its other keys
    get their defaults."""
    if not isinstance(value, Mapping):
        return {key: (value, True)}
    known = {path: (one, False) for path, one in leaves(asdict(defaults)).items() if path.startswith(f"{key}.")}
    return known | {path: (one, True) for path, one in leaves(cast("Mapping[str, Any]", value), under=key).items()}


def _applies(proposed: ValueIf, at: str, section: str, config: DictConfig) -> bool:
    keys = {f"{at}{key.removeprefix(section)}": expected for key, expected in proposed.when.items()}
    return all(OmegaConf.select(config, key) == expected for key, expected in keys.items())


def _source(path: str, origins: Mapping[str, Origin]) -> str:
    """Source of a value, or of a section that it is in: `recipe` or `command line`; "" if neither set it."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins[path].source if path else ""


def _set(config: DictConfig, path: str, value: Any, *, algorithm: str) -> None:
    try:
        with open_dict(config):
            OmegaConf.update(config, path, value, merge=False)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise PluginBroken(f"algorithm {algorithm!r} proposes {path}={value!r}: {text}.") from error
