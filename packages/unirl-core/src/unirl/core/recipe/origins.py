"""Where each value of a composed recipe came from: replayed from Hydra's own defaults list, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from ..specs.leaves import leaves
from ..specs.plan import Origin
from .files import PART_GROUPS
from .hydra_source import PARTS, ROOT, SCHEMA

__all__ = ["Layer", "Slot", "layers_of", "origin_below", "origin_of", "trace"]

MISSING = "???"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A section of a recipe that holds a part."""

    package: str
    """Path of the section: `model`, `reward.shapes`."""
    group: str
    name: str
    chosen: Origin
    """Who chose it."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The values set by one entry of the defaults list, or by one override."""

    values: Mapping[str, Any]
    """Key path -> value, interpolations unresolved."""
    origins: Mapping[str, Origin]
    slot: Slot | None = None


def layers_of(
    defaults: Iterable[ResultDefault],
    *,
    load: Callable[[str], ConfigResult],
    overrides: Sequence[Override],
    chosen_in: Mapping[str, str | None],
) -> list[Layer]:
    """The layers of a composition, in the order in which Hydra merges them.

    load: the config of a path, not merged with any other yet.  overrides: of the command line, parsed.
    chosen_in: override key of a group -> the file whose `override` decided it, None when the command line did.
    """
    # A group given a mapping (`model={path: x}`) sets values; it does not choose an option.
    choices = [o for o in overrides if o.key_or_group in PART_GROUPS and not isinstance(o.value(), dict)]
    settings = [o for o in overrides if o not in choices and not o.is_delete()]
    layers: list[Layer] = []
    for default in defaults:
        path = cast(str, default.config_path)
        if path == ROOT:
            continue
        loaded = load(path)
        config = cast(DictConfig, loaded.config)
        package = default.package or ""
        if loaded.provider == PARTS:
            layers.append(_part_layer(config, path, package, _chooser(default, choices, chosen_in)))
        else:
            values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
            values.pop("defaults", None)
            flat = leaves(values, under=package)
            origin = Origin(source="recipe", detail=f"{path}.yaml")
            layers.append(Layer(values=flat, origins=dict.fromkeys(flat, origin)))
    return [*layers, *(_override_layer(override) for override in settings)]


def trace(layers: Iterable[Layer]) -> dict[str, Origin]:
    """Key path -> the layer that set it last, as Hydra merges: a value replaces what was below its path."""
    result: dict[str, Origin] = {}
    for layer in layers:
        for path, value in layer.values.items():
            if value == MISSING and path in result:
                continue
            if value != {}:
                for below in [other for other in result if other.startswith(f"{path}.")]:
                    del result[below]
            result[path] = layer.origins[path]
    return result


def origin_of(path: str, found: Mapping[str, Origin]) -> Origin:
    """The origin of a leaf; a value from an interpolation has the origin of the interpolation."""
    while path not in found:
        path = path.rpartition(".")[0]
        assert path, "every leaf of a composed recipe was set by some layer"
    return found[path]


def origin_below(path: str, found: Mapping[str, Origin]) -> Origin | None:
    """The origin of a key or, for a section, of its value that was set last; None when nothing in it was set."""
    return next((found[key] for key in reversed(list(found)) if f"{key}.".startswith(f"{path}.")), None)


def _part_layer(config: DictConfig, path: str, package: str, chosen: Origin) -> Layer:
    values = leaves(cast(dict[str, Any], OmegaConf.to_container(config, resolve=False)))
    prefix = f"{package}." if package else ""
    origins = {prefix + key: Origin(source="default", detail=_owner(config, key)) for key in values}
    slot = None
    if path != SCHEMA:
        group, _, name = path.rpartition("/")
        slot = Slot(package=package, group=group, name=name, chosen=chosen)
        if f"{prefix}use" in origins:
            origins[f"{prefix}use"] = chosen
    return Layer(values={prefix + key: value for key, value in values.items()}, origins=origins, slot=slot)


def _owner(config: DictConfig, path: str) -> str:
    """Name of the dataclass that declares a leaf."""
    node, owner = config, cast(type, OmegaConf.get_type(config))
    for key in path.split(".")[:-1]:
        node = cast(DictConfig, node[key])
        kind = OmegaConf.get_type(node)
        if kind is not None and is_dataclass(kind):
            owner = kind
    return owner.__name__


def _chooser(default: ResultDefault, choices: Sequence[Override], chosen_in: Mapping[str, str | None]) -> Origin:
    key = default.override_key
    for override in choices:
        package = override.package or override.key_or_group
        if package == (default.package or "") and not override.is_delete():
            return Origin(source="command line", detail=cast(str, override.input_line))
    file = chosen_in.get(key) if key is not None else None
    return Origin(source="recipe", detail=f"{file or default.parent}.yaml")


def _override_layer(override: Override) -> Layer:
    key, value = override.key_or_group, override.value()
    flat = leaves(value, under=key) if isinstance(value, dict) and value else {key: value}
    origin = Origin(source="command line", detail=cast(str, override.input_line))
    return Layer(values=flat, origins=dict.fromkeys(flat, origin))
