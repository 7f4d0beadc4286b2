"""A mutant: a part that is broken on purpose, in one way, to show that a claim can fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardSpec

T = TypeVar("T")
_ATTRIBUTE = "__mutant__"
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])")

KINDS: tuple[SubjectKind, ...] = tuple(
    kind for kind in SUBJECT_KINDS if Path(__file__).with_name(f"{kind}.py").exists()
)
"""Each has a module of this package with `MUTANTS`, and `catalog()` that holds them next to parts that are well."""


CATALOGS: dict[SubjectKind, tuple[str, ...]] = {
    # Those of which one start serves many claims are apart.
    "engine": ("engine:catalog", "engine_apart_broken:catalog", "engine_media:catalog"),
    # Parts that are broken would meet in cells of their own, so each kind of them has a catalog.
    "cell": ("cell:catalog", "cell_sampler:catalog", "cell_text:broken_engines", "cell_text:broken_backends"),
}
"""Where a kind has more catalogs than `catalog()` of its module."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    claim: str
    """The claim that must fail."""
    name: str
    """Of the broken part (or dist), unique in its catalog."""
    breaks: str
    """What is wrong with it, in a few words: "rounds the sigmas to bf16"."""
    also: tuple[str, ...] = ()
    """Claims that cannot but fail as well; any other claim must still hold."""
    promises: tuple[Cap, ...] = ()
    """Of a backend: the capabilities that its claim needs, and no more."""
    spec: RewardSpec | None = None
    """Of a reward: that of the one which is well."""


def mutant(
    claim: str,
    *,
    breaks: str,
    name: str = "",
    also: tuple[str, ...] = (),
    promises: tuple[Cap, ...] = (),
    spec: RewardSpec | None = None,
) -> Callable[[type[T]], type[T]]:
    """Make a class a mutant of its module. name: that of the class where it is empty, `RoundsSigmas` as
    `rounds-sigmas`."""

    def mark(kind: type[T]) -> type[T]:
        named = name or _CAPITAL.sub("-", kind.__name__).lower()
        made = Mutant(claim=claim, name=named, breaks=breaks, also=also, promises=promises, spec=spec)
        setattr(kind, _ATTRIBUTE, made)
        return kind

    return mark


def mutants_in(module: str) -> dict[type[Any], Mutant]:
    """The classes of a module that are marked as mutants so far, in their order."""
    return {
        kind: vars(kind)[_ATTRIBUTE]
        for kind in vars(sys.modules[module]).values()
        if isinstance(kind, type) and kind.__module__ == module and _ATTRIBUTE in vars(kind)
    }


def catalogs_of(kind: SubjectKind) -> list[str]:
    """`"module:function"` of the catalogs that hold the mutants of a kind."""
    return [f"{__package__}.{name}" for name in CATALOGS.get(kind, (f"{kind}:catalog",))]


def mutants_of(kind: SubjectKind) -> list[Mutant]:
    """All mutants of a kind."""
    modules = dict.fromkeys(name.partition(":")[0] for name in catalogs_of(kind))
    return [mutant for module in modules for mutant in import_module(module).MUTANTS]
