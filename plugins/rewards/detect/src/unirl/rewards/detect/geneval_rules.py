"""GenEval's rules, as a function of detections and metadata.

Source: GenEval, arXiv 2310.11513, section 3, with the constants of its published code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from .geneval_metadata import Objects, Scene

__all__ = ["Box", "Detection", "Judgement", "judge", "relations", "without_overlaps"]

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels; y grows downwards."""

_TOLERANCE = 0.1
"""Fraction of the summed sizes of two objects by which their centres may differ without being apart."""
_SLOPE = 0.5
"""Smallest component of the remaining offset, as a fraction of the distance of the centres."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """An object of a known class in an image."""

    box: Box
    score: float
    color: str | None = None
    """Named where the scene asks for a colour."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How well an image meets a scene; each in [0, 1]."""

    strict: float
    """1 if all requirements are met, else 0."""
    soft: float
    """Mean over all requirements; 1 exactly where `strict` is."""
    count: float
    color: float
    position: float
    """Mean over the requirements of each kind; 1 where the scene has none."""


def judge(scene: Scene, detections: Mapping[str, Sequence[Detection]]) -> Judgement:
    """Judge the objects of an image.

    detections: class -> objects above the threshold, in any order; a class may be absent.

    A requirement is a count (of each class in `include` and `exclude`), a colour or a position. Counts need the number
    in `include` or more, and fewer than in `exclude`: max(0, 1 - distance to the allowed range / number). Colours and
    positions are judged on the `count` objects with the highest scores: the fraction of them, or of their pairs with
    the objects of the target, that is right; missing objects are not.
    """
    best = [_best(detections.get(objects.name, ()), objects.count) for objects in scene.include]
    count = [_count(objects, len(detections.get(objects.name, ()))) for objects in scene.include]
    count += [_below(limit, len(detections.get(name, ()))) for name, limit in scene.exclude.items()]
    color: list[float] = []
    position: list[float] = []
    for objects, own in zip(scene.include, best, strict=True):
        if objects.color is not None:
            color.append(sum(one.color == objects.color for one in own) / objects.count)
        if objects.position is not None:
            relation, target = objects.position
            right = sum(relation in relations(one.box, other.box) for one, other in product(own, best[target]))
            position.append(right / (objects.count * scene.include[target].count))
    every = [*count, *color, *position]
    return Judgement(
        strict=float(all(value == 1 for value in every)),
        soft=_mean(every),
        count=_mean(count),
        color=_mean(color),
        position=_mean(position),
    )


def relations(box: Box, other: Box) -> frozenset[str]:
    """Where `box` lies as seen from `other`: at most one of `left of` and `right of`, and of `above` and `below`.

    The offset of the centres is shortened on each axis by a tenth of both sizes. An axis counts where the rest is more
    than half of the distance between the centres.
    """
    offsets, rests = zip(*(_offset(box, other, axis) for axis in (0, 1)), strict=True)
    distance = math.hypot(*offsets)
    if all(abs(rest) < 1e-3 for rest in rests):
        return frozenset()
    names = (("left of", "right of"), ("above", "below"))
    return frozenset(names[axis][rest > 0] for axis, rest in enumerate(rests) if abs(rest) / distance > _SLOPE)


def without_overlaps(detections: Sequence[Detection], *, most: float) -> list[Detection]:
    """Detections of one class by falling score, without those that overlap a better one.

    most: largest intersection over union that is kept; 1 keeps all.
    """
    ordered = sorted(detections, key=lambda one: -one.score)
    if most >= 1:
        return ordered
    kept: list[Detection] = []
    for one in ordered:
        if all(_overlap(one.box, other.box) <= most for other in kept):
            kept.append(one)
    return kept


def _best(detections: Sequence[Detection], count: int) -> list[Detection]:
    return sorted(detections, key=lambda one: -one.score)[:count]


def _count(objects: Objects, result: int) -> float:
    surplus = 0 if objects.limit is None else result - (objects.limit - 1)
    return max(0.0, 1 - max(objects.count - result, surplus, 0) / objects.count)


def _below(limit: int, result: int) -> float:
    return max(0.0, 1 - max(result - (limit - 1), 0) / limit)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0


def _offset(box: Box, other: Box, axis: int) -> tuple[float, float]:
    """Offset of the centres along an axis, and what remains of it beyond the tolerance."""
    low, high, other_low, other_high = box[axis], box[axis + 2], other[axis], other[axis + 2]
    offset = (low + high) / 2 - (other_low + other_high) / 2
    rest = max(abs(offset) - _TOLERANCE * (abs(high - low) + abs(other_high - other_low)), 0.0)
    return offset, math.copysign(rest, offset)


def _overlap(box: Box, other: Box) -> float:
    """Intersection over union; 0 for boxes without area."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(box) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)
