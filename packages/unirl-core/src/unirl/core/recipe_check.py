"""What Hydra does not check of a composed recipe: that each section has its part, and that nothing is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig, OmegaConf

from .errors import RecipeError
from .names import did_you_mean

if TYPE_CHECKING:
    from .origins import Layer, Slot

__all__ = ["REQUIRED", "check_hydra_overrides", "check_keys", "check_missing", "check_schema", "check_slots"]

REQUIRED = ("model", "engine", "backend", "algorithm", "sampling")
"""Sections without which there is no plan."""
NAMED = ("reward", "tracker")
"""Sections that hold any number of parts, each under a name of its own."""
HYDRA_KEYS = ("hydra.searchpath", "hydra.sweep.dir")
"""Settings of Hydra itself that mean something here."""


def check_hydra_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides of Hydra's own settings that would have no effect."""
    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if (key == "hydra" or key.startswith(("hydra.", "hydra/"))) and key not in HYDRA_KEYS:
            raise RecipeError(
                f"{key}: this setting of Hydra has no effect here. Run folders are set by `run.dir`, "
                f"sweeps by `--multirun`; of Hydra's own settings {' and '.join(HYDRA_KEYS)} are honoured."
            )


def check_schema(defaults: Sequence[tuple[str, str, str]], *, recipe: str) -> None:
    """The schema of a recipe stands first in the defaults list, and only there: later it would undo what was set."""
    schemas = [number for number, (path, _, _) in enumerate(defaults) if path == "unirl"]
    if schemas != [0]:
        found = "is not there" if not schemas else "comes once, as the first entry of the first file, and not again"
        raise RecipeError(f"{recipe}: `- /unirl`, the schema of a recipe, {found}: fix the defaults list.")


def check_slots(
    layers: Sequence[Layer],
    slots: Mapping[str, Slot],
    *,
    recipe: str,
) -> None:
    """Every part stands where it belongs, every required section has one, and `use` was set by choosing."""
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
                f"{slot.package}: {both} were chosen; use `override /{slot.group}: {slot.name}` to replace the first."
            )
    for layer in layers:
        for path, value in layer.values.items():
            package, _, key = path.rpartition(".")
            if layer.slot is None and key == "use" and package in placed and value != placed[package].name:
                group = placed[package].group
                at = group if package == group else f"{group}@{package}"
                raise RecipeError(
                    f"{path}: set to {value!r} by hand, while {placed[package].name!r} is chosen. "
                    f"Choose it instead: `{at}={value}`."
                )
    chosen = {slot.group for slot in slots.values()}
    missing = [group for group in REQUIRED if group not in chosen]
    if missing:
        entries = ", ".join(f"`- /{group}: NAME`" for group in missing)
        raise RecipeError(f"{recipe}: no {', '.join(missing)} is chosen; add {entries} to its defaults.")


def check_keys(config: DictConfig, slots: Mapping[str, Slot]) -> None:
    """No key beyond the fields of its dataclass (`+key=` can add some), no section that no part was chosen for."""
    for group in NAMED:
        for key in cast(DictConfig, config[group]):
            if f"{group}.{key}" not in slots:
                raise RecipeError(
                    f"{group}.{key}: has settings, but no {group} was chosen for it; "
                    f"add `/{group}@{group}.{key}: NAME` to the defaults, or `+{group}@{group}.{key}=NAME`."
                )
    _check_node(config, "")


def check_missing(config: DictConfig) -> None:
    """Every value that a recipe leaves to its user is given."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        given = " ".join(f"{key}=..." for key in missing)
        what = "this value is" if len(missing) == 1 else "these values are"
        raise RecipeError(f"{', '.join(missing)}: {what} left to you by the recipe; add {given}")


def _check_place(slot: Slot) -> None:
    group, package = slot.group, slot.package
    under, _, name = package.partition(".")
    is_named = group in NAMED or (group == "sampling" and package != "sampling")
    if under == group and bool(name) == is_named and "." not in name:
        return
    at = f"{group}@{group}.{slot.name.replace('-', '_')}" if group in NAMED else group
    raise RecipeError(
        f"{package or 'the top level'}: {group} {slot.name!r} ({slot.chosen.detail}) cannot stand here; "
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
