"""A mutant: a part that is broken on purpose, in one way, to show that a claim can fail."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind

KINDS: tuple[SubjectKind, ...] = tuple(
    kind for kind in SUBJECT_KINDS if Path(__file__).with_name(f"{kind}.py").exists()
)
"""Each has a module of this package with `MUTANTS`, and `catalog()` that holds them next to parts that are well."""


CATALOGS: dict[SubjectKind, tuple[str, ...]] = {
    # Those of which one start serves many claims are apart.
    "engine": ("engine:catalog", "engine_apart_broken:catalog"),
    # Parts that are broken would meet in cells of their own, so each kind of them has a catalog.
    "cell": ("cell:catalog", "cell_text:broken_engines", "cell_text:broken_backends"),
}
"""Where a kind has more catalogs than `catalog()` of its module."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    claim: str
    """The claim that must fail."""
    name: str
    """Of the broken part (or dist), unique in its catalog."""
    broken: str
    """What is wrong with it, in a few words: "rounds the sigmas to bf16"."""
    also: tuple[str, ...] = ()
    """Claims that cannot but fail as well; any other claim must still hold."""


def catalogs_of(kind: SubjectKind) -> list[str]:
    """`"module:function"` of the catalogs that hold the mutants of a kind."""
    return [f"{__package__}.{name}" for name in CATALOGS.get(kind, (f"{kind}:catalog",))]


def mutants_of(kind: SubjectKind) -> list[Mutant]:
    """All mutants of a kind."""
    modules = dict.fromkeys(name.partition(":")[0] for name in catalogs_of(kind))
    return [mutant for module in modules for mutant in import_module(module).MUTANTS]
