"""Parts that replace a recipe's own: `unirl train sd3/flow-grpo engine=sglang`.

A recipe file was written for the parts that it chose. When one is replaced, the file's values that the new part has no
key for are left out, and the plan says so; the others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig, OmegaConf, open_dict

from ..specs.plan import LeftOut
from .files import PART_GROUPS

__all__ = ["Exchange", "exchanges", "leave_out"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A part that replaces another."""

    package: str
    """Its section: `engine`."""
    group: str
    name: str
    known: frozenset[str]
    """Its keys."""
    files: frozenset[str]
    """Config paths of the recipe files that are merged before it was chosen."""


def exchanges(
    defaults: Sequence[ResultDefault],
    *,
    chosen_in: Mapping[str, str | None],
    config_class: Callable[[str, str], type[Any]],
) -> tuple[Exchange, ...]:
    """The parts that replace a choice of an earlier file.

    defaults: Hydra's list, in the order in which it merges.  chosen_in: override key of a group -> the file whose
    `override` decided it, None when the command line did.  config_class: of a group and an option.
    """
    recipes = [path for path in (default.config_path or "" for default in defaults) if not _is_part(path)]
    result: list[Exchange] = []
    for default in defaults:
        path, key = default.config_path or "", default.override_key
        if not _is_part(path) or key is None or key not in chosen_in:
            continue
        file = chosen_in[key]
        before = recipes if file is None or file not in recipes else recipes[: recipes.index(file)]
        group, _, name = path.rpartition("/")
        known = frozenset(item.name for item in fields(config_class(group, name)))
        package = default.package or ""
        result.append(Exchange(package=package, group=group, name=name, known=known, files=frozenset(before)))
    return tuple(result)


def leave_out(config: DictConfig, *, file: str, exchanged: Iterable[Exchange]) -> list[LeftOut]:
    """Removes from a recipe file the values that replacement parts have no key for, and returns them."""
    result: list[LeftOut] = []
    for one in exchanged:
        section = OmegaConf.select(config, one.package) if file in one.files else None
        if not isinstance(section, DictConfig):
            continue
        for key in [str(key) for key in section if str(key) not in one.known]:
            value = OmegaConf.to_container(section, resolve=False)[key]  # type: ignore[index,call-overload]
            part = f"{one.group} {one.name!r}"
            result.append(LeftOut(path=f"{one.package}.{key}", value=value, file=file, part=part))
            with open_dict(section):
                del section[key]
    return result


def _is_part(path: str) -> bool:
    return path.rpartition("/")[0] in PART_GROUPS
