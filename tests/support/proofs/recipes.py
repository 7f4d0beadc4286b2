"""What a recipe names: other recipes, parts and modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["ASSET", "NAMED", "WORD", "Recipe", "read_recipe"]

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:/[A-Za-z0-9_-]+)*")
ASSET = re.compile(r"\$\{asset:([\w-]+)[^}]*\}")
"""A file of a package, whose name may also be that of a recipe."""
NAMED = re.compile(r"\b([A-Za-z_]\w*(?:\.\w+)+):\w")
"""A module, such as that of a reward's function."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    bases: tuple[str, ...]
    """Recipes that it extends."""
    overridden: frozenset[str]
    """Groups of parts for which it overrides the choice of its bases."""
    chosen: dict[str, str]
    """Group -> part."""
    words: frozenset[str]
    """All others."""
    assets: frozenset[str]
    modules: frozenset[str]


def read_recipe(text: str) -> Recipe:
    data: dict[str, Any] = yaml.safe_load(text) or {}
    bases, overridden, chosen = list[str](), set[str](), dict[str, str]()
    for entry in data.pop("defaults", ()):
        if isinstance(entry, str):
            bases.append(entry.lstrip("/"))
            continue
        ((key, value),) = entry.items()
        words = key.split()
        group = words[-1].lstrip("/")
        chosen[group] = str(value)
        if words[0] == "override":
            overridden.add(group)
    texts = [ASSET.sub("", text) for text in _texts(data)]
    return Recipe(
        bases=tuple(bases),
        overridden=frozenset(overridden),
        chosen=chosen,
        words=frozenset(word for text in texts for word in WORD.findall(text)),
        assets=frozenset(ASSET.findall(text)),
        modules=frozenset(NAMED.findall(text)),
    )


def _texts(data: object) -> Iterator[str]:
    match data:
        case str():
            yield data
        case dict():
            for key, value in data.items():
                yield from _texts(key)
                yield from _texts(value)
        case list():
            for value in data:
                yield from _texts(value)
        case _:
            pass
