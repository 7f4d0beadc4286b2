"""GenEval's metadata of a prompt, checked.

Schema: the rows of GenEval's evaluation_metadata.jsonl (arXiv 2310.11513): `tag`, `include` and, optionally, `exclude`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from unirl.core.names import did_you_mean

__all__ = ["COLORS", "COUNTING", "RELATIONS", "TAGS", "Objects", "Scene", "read_scene"]

COUNTING = "counting"
TAGS = ("single_object", "two_object", COUNTING, "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True, kw_only=True)
class Objects:
    """Objects of one class that the image must contain."""

    name: str
    count: int
    limit: int | None = None
    """So many of them, or more, are wrong; None allows any number."""
    color: str | None = None
    position: tuple[str, int] | None = None
    """Relation, and index of an earlier entry of `include`: this object is `left of` that one."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Requirements of a prompt."""

    tag: str
    include: tuple[Objects, ...]
    exclude: Mapping[str, int]
    """Other classes: so many of them, or more, are wrong."""

    @property
    def names(self) -> tuple[str, ...]:
        """All classes to look for."""
        return (*(objects.name for objects in self.include), *self.exclude)


def read_scene(metadata: Mapping[str, Any]) -> Scene:
    """The scene that a prompt's metadata describe. Keys besides `tag`, `include` and `exclude` are not read.

    Raises ValueError, with the path of the value first, for metadata that no image or no rule of GenEval could meet.
    """
    for key in ("tag", "include"):
        if key not in metadata:
            raise ValueError(f"{key}: missing; expected GenEval's metadata, with `tag` and `include`.")
    tag = _choice(metadata["tag"], TAGS, "tag")
    limits: dict[str, int] = {}
    for path, entry in _entries(metadata.get("exclude", []), "exclude", ("class", "count")):
        name = _name(entry, path, limits)
        limits[name] = _count(entry, path)
    include: list[Objects] = []
    for path, entry in _entries(metadata["include"], "include", ("class", "count", "color", "position")):
        name = _name(entry, path, [objects.name for objects in include])
        count, limit = _count(entry, path), limits.pop(name, None)
        if limit is not None and limit <= count:
            raise ValueError(
                f"{path}.count: got {count} of {name!r}, but `exclude` rejects {limit} or more; no image has both."
            )
        color = _choice(entry["color"], COLORS, f"{path}.color") if "color" in entry else None
        position = _position(entry["position"], len(include), f"{path}.position") if "position" in entry else None
        include.append(Objects(name=name, count=count, limit=limit, color=color, position=position))
    if not include:
        raise ValueError("include: got an empty list, expected one object or more.")
    return Scene(tag=tag, include=tuple(include), exclude=limits)


def _entries(value: object, key: str, known: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Path and entry of a list of objects that have `class`, `count` and no unknown key."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}: got {value!r}, expected a list of objects.")
    for index, entry in enumerate(cast("Sequence[object]", value)):
        path = f"{key}[{index}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f'{path}: got {entry!r}, expected an object such as {{"class": "cat", "count": 1}}.')
        result = cast("Mapping[str, object]", entry)
        if missing := [name for name in ("class", "count") if name not in result]:
            raise ValueError(f"{path}: `{missing[0]}` is missing.")
        if unknown := sorted(set(result) - set(known)):
            raise ValueError(
                f"{path}: got the unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}, expected "
                f"{', '.join(known)}."
            )
        yield path, result


def _name(entry: Mapping[str, object], path: str, known: Sequence[str] | Mapping[str, int]) -> str:
    name = entry["class"]
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{path}.class: got {name!r}, expected the name of an object.")
    if name in known:
        raise ValueError(f"{path}.class: {name!r} occurs twice; expected one entry for each class.")
    return name


def _count(entry: Mapping[str, object], path: str) -> int:
    count = entry["count"]
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{path}.count: got {count!r}, expected a whole number of 1 or more.")
    return count


def _choice(value: object, known: Sequence[str], path: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{path}: got {value!r}, expected one of {', '.join(known)}{did_you_mean(str(value), known)}.")
    return value


def _position(value: object, index: int, path: str) -> tuple[str, int]:
    pair: Sequence[object] = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2:
        raise ValueError(f'{path}: got {value!r}, expected a relation and an index, such as ["left of", 0].')
    target = pair[1]
    if not isinstance(target, int) or isinstance(target, bool) or not 0 <= target < index:
        raise ValueError(f"{path}: got entry {target!r} as the target, expected the index of an earlier entry.")
    return _choice(pair[0], RELATIONS, path), target
