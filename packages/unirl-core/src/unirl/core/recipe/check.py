"""Checks of a composed recipe that Hydra does not make: every section has its part, and there are no stray keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from ..errors import RecipeError
from ..names import did_you_mean

if TYPE_CHECKING:
    from .origins import Layer, Slot

__all__ = [
    "REQUIRED",
    "check_hydra_overrides",
    "check_keys",
    "check_missing",
    "check_schema",
    "check_slots",
    "switched_off",
]

REQUIRED = ("model", "engine", "backend", "algorithm", "sampling")
"""Sections without which there is no plan."""
NAMED = ("reward", "tracker")
"""Sections that hold any number of parts, each under its own name."""
EITHER = ("model", "backend", "engine", "algorithm", "sampling", "environment")
"""Sections that hold one part, or several by the name of a model or a stage."""
HYDRA_KEYS = ("hydra.searchpath", "hydra.sweep.dir")
"""Hydra's own settings that have an effect here."""


def check_hydra_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides of Hydra's own settings that would have no effect."""
    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if (key == "hydra" or key.startswith(("hydra.", "hydra/"))) and key not in HYDRA_KEYS:
            raise RecipeError(
                f"{key}: this Hydra setting has no effect here. Set the run folder with `run.dir` and run sweeps with "
                f"`--multirun`; only {' and '.join(HYDRA_KEYS)} are honoured."
            )


def switched_off(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides with every `=null` that removes a part, and every new stage, in Hydra's syntax; and the sections
    that become empty.

    `tracker=null` removes every tracker, `tracker.report=null`, `reward.light=null` and `environment=null` one part,
    `eval=null` the held-out data.
    """
    kept: list[str] = []
    emptied: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        if value != "null":
            kept.append(_nested(override))
        elif key == "tracker":
            emptied.append(key)
        elif key == "environment":
            kept.append(f"~{key}")
            # A file may have settings of it.
            emptied.append(key)
        elif section in NAMED and name and "." not in name:
            kept.append(f"~{key}")
        else:
            kept.append("data.eval=null" if key == "eval" else override)
    return kept, emptied


def _nested(override: str) -> str:
    """`+stages.a.samples=2` as `+stages={a: {samples: 2}}`: Hydra adds a typed section by merging alone."""
    plus, section, rest = override.partition("stages.")
    key, equals, value = rest.partition("=")
    if plus not in ("+", "++") or not equals:
        return override
    for name in reversed(key.split(".")):
        value = f"{{{name}: {value}}}"
    return f"{plus}{section[:-1]}={value}"


def check_schema(defaults: Sequence[tuple[str, str, str]], *, recipe: str) -> None:
    """Refuse a defaults list in which the schema is not the first and only entry of its name: later, it would reset
    values that were set before it."""
    schemas = [number for number, (path, _, _) in enumerate(defaults) if path == "unirl"]
    if schemas != [0]:
        result = "is missing" if not schemas else "must come only once, as the first entry of the first file"
        raise RecipeError(f"{recipe}: `- /unirl`, the schema of a recipe, {result}: fix the defaults list.")


def check_slots(
    layers: Sequence[Layer],
    slots: Mapping[str, Slot],
    *,
    recipe: str,
) -> None:
    """Check that every part is in its section, that no required section is empty, and that no `use` was set by hand."""
    placed: dict[str, Slot] = {}
    for layer in layers:
        if layer.slot is None:
            continue
        slot = layer.slot
        _check_place(slot)
        before = placed.setdefault(slot.package, slot)
        if before.name != slot.name:
            both = " and ".join(f"{chosen.name!r} ({chosen.chosen.detail})" for chosen in (before, slot))
            raise RecipeError(
                f"{slot.package}: got {both}; use `override /{slot.group}: {slot.name}` to replace the first."
            )
    for layer in layers:
        for path, value in layer.values.items():
            package, _, key = path.rpartition(".")
            if layer.slot is None and key == "use" and package in placed and value != placed[package].name:
                group = placed[package].group
                at = group if package == group else f"{group}@{package}"
                raise RecipeError(
                    f"{path}: got {value!r}, but the part chosen here is {placed[package].name!r}. "
                    f"Choose the part instead of setting `use`: `{at}={value}`."
                )
    for group in EITHER:
        here = [key for key, slot in slots.items() if slot.group == group]
        if group in here and len(here) > 1:
            named = next(key for key in here if key != group)
            raise RecipeError(
                f"{group}: got {slots[group].name!r} as the whole section and {slots[named].name!r} as {named}; use "
                "one way for all of them."
            )
    chosen = {slot.group for slot in slots.values()}
    missing = [group for group in REQUIRED if group not in chosen]
    if missing:
        entries = ", ".join(f"`- /{group}: NAME`" for group in missing)
        raise RecipeError(f"{recipe}: no {', '.join(missing)} is chosen; add {entries} to its defaults.")


def check_keys(config: DictConfig, slots: Mapping[str, Slot]) -> None:
    """Refuse keys that are not fields of their dataclass (`+key=` can add them), sections without a chosen part, and
    values in place of sections."""
    for group in (*NAMED, *EITHER):
        for key in () if group in slots else cast(DictConfig, config[group] or {}):
            if f"{group}.{key}" not in slots:
                raise RecipeError(
                    f"{group}.{key}: has settings, but no {group} is chosen for it; add "
                    f"`/{group}@{group}.{key}: NAME` to the defaults, or `+{group}@{group}.{key}=NAME` to the command."
                )
    for key, slot in slots.items():
        value = OmegaConf.select(config, key)
        if value is not None and not isinstance(value, DictConfig):
            part = value if isinstance(value, str) else "NAME"
            raise RecipeError(
                f"{key}: got {value!r}, expected settings. To choose a part, write `{slot.group}@{key}={part}`."
            )
    _check_node(config, "")


def check_missing(config: DictConfig) -> None:
    """Refuse a recipe with mandatory values that are not set."""
    # Not `OmegaConf.missing_keys`, which resolves every value to look at it.
    missing = sorted(_missing(OmegaConf.to_container(config), ""))
    if missing:
        given = " ".join(f"{key}=..." for key in missing)
        what = "this value" if len(missing) == 1 else "these values"
        raise RecipeError(f"{', '.join(missing)}: the recipe has no default for {what}; add {given}")


def _missing(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in cast("dict[Any, Any]", value).items():
            yield from _missing(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, one in enumerate(cast("list[Any]", value)):
            yield from _missing(one, f"{path}[{number}]")
    elif value == MISSING:
        yield path


def _check_place(slot: Slot) -> None:
    group, package = slot.group, slot.package
    under, _, name = package.partition(".")
    is_named = group in NAMED or (group in EITHER and package != group)
    if under == group and bool(name) == is_named and "." not in name:
        return
    at = f"{group}@{group}.{slot.name.replace('-', '_')}" if group in NAMED else group
    raise RecipeError(
        f"{package or 'the top level'}: {group} {slot.name!r} ({slot.chosen.detail}) does not belong in this section; "
        f"choose it as `/{at}: {slot.name}`."
    )


def _check_node(node: DictConfig, path: str) -> None:
    kind = OmegaConf.get_type(node)
    known = {item.name for item in fields(kind)} if kind is not None and is_dataclass(kind) else None
    for key in node:
        here = f"{path}.{key}" if path else str(key)
        if known is not None and key not in known:
            raise RecipeError(
                f"{here}: {cast(type, kind).__name__} has no such key{did_you_mean(str(key), known) or '.'} "
                f"It has {', '.join(sorted(known - {'use'}))}."
            )
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, str(key)):
            continue
        child = node[key]
        if isinstance(child, DictConfig):
            _check_node(child, here)
