"""A mutant: a part that is broken on purpose, in one way, to show that a claim can fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind

KINDS: tuple[SubjectKind, ...] = tuple(
    kind for kind in SUBJECT_KINDS if Path(__file__).with_name(f"{kind}.py").exists()
)
"""Each has a module of this package with `MUTANTS`, and `catalog()` that holds them next to parts that are well."""


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
