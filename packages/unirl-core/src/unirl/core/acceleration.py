"""Settings that trade exact numbers for speed or memory, as config classes declare them beside their fields.

    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "dtype": Acceleration(scope="both", error={"bfloat16": BF16, "float16": FP16}),
        "extra.kv_cache_dtype": Acceleration(scope="rollout", error=math.inf),
    }

Keys are fields of the class, or entries of its free mappings. A subclass inherits the declarations, and replaces those
of its own keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, cast

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "NARROW",
    "TF32",
    "Acceleration",
    "InEffect",
    "Loss",
    "Scope",
    "declared",
    "in_effect",
]

Scope: TypeAlias = Literal["training", "rollout", "both", "reward"]
"""Where the numbers change: in training alone; in rollouts alone, so that another policy generates than the one that
trains; in training and in rollouts in process, which share the module; or in what rewards see and compute."""
Loss: TypeAlias = Literal["none", "bounded", "unbounded"]

FP32, TF32, FP16, BF16 = 2.0**-24, 2.0**-11, 2.0**-11, 2.0**-8
"""Largest relative error of rounding a number to a format: half a unit in the last of its 24, 11, 11 and 8 bits."""
NARROW: Mapping[str, float] = {"bfloat16": BF16, "float16": FP16}
"""Errors of a setting that takes the name of a dtype."""
_OFF = (None, False, 0, "", "none", "auto")


@dataclass(frozen=True, kw_only=True)
class Acceleration:
    """The declaration of one setting."""

    scope: Scope
    error: float | Mapping[str, float]
    """Relative error of each number that the setting rounds: 0 changes no bit, infinity has no bound. A mapping has the
    values of the setting that have one; a number is that of all values but null, false, 0, "", `none`, `auto` and
    `exact`."""
    exact: tuple[Any, ...] = ()
    """Further values without an error."""
    tries: tuple[Any, ...] = ()
    """Values that conformance tries where `error` is a number, of a setting that takes more than it could."""

    def error_of(self, value: object) -> float | None:
        """The error with this value of the setting; None where it has no effect."""
        if isinstance(self.error, Mapping):
            errors = (self.error.get(text.lower()) for text in _texts(value))
            return max((error for error in errors if error is not None), default=None)
        text = value.lower() if isinstance(value, str) else value
        # Equal and of one type: 0 is not False, and a free entry may be any of JSON's.
        is_off = any(text == one and type(text) is type(one) for one in (*_OFF, *self.exact))
        return None if is_off else self.error


@dataclass(frozen=True, kw_only=True)
class InEffect:
    """A setting with a value that changes numbers, or that does the same in less time or memory."""

    key: str
    """Its key path in the recipe."""
    value: Any
    scope: Scope
    error: float

    @property
    def loss(self) -> Loss:
        """How much of exactness it takes."""
        return "none" if not self.error else "bounded" if self.error < math.inf else "unbounded"

    @property
    def where(self) -> str:
        """The scope in words."""
        words = {"both": "training and rollouts in process", "rollout": "rollouts alone", "reward": "rewards"}
        return words.get(self.scope, self.scope)

    @property
    def effect(self) -> str:
        """The loss in words."""
        if self.loss == "bounded":
            return f"bounded, numbers round to {self.error:.1g} of themselves"
        return {"none": "exact", "unbounded": "without a bound"}[self.loss]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, which a free entry may nest."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(cast("Mapping[str, Any]", value).values()))
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _texts(item)


@cache
def declared(config: type[Any]) -> Mapping[str, Acceleration]:
    """Relative key -> declaration of every setting of a config class, inherited ones included."""
    result: dict[str, Acceleration] = {}
    for cls in reversed(config.__mro__):
        result |= cls.__dict__.get("accelerations", {})
    return result


def in_effect(config: object, *, key: str) -> Iterator[InEffect]:
    """The declared settings of a config whose values take effect. key: path of the config in the recipe."""
    for name, one in declared(type(config)).items():
        field, _, entry = name.partition(".")
        value = getattr(config, field)
        if entry:
            value = value.get(entry)
        if (error := one.error_of(value)) is not None:
            yield InEffect(key=f"{key}.{name}", value=value, scope=one.scope, error=error)
