"""The sets that can be converted, by name."""

from __future__ import annotations

from unirl.core.errors import DataError
from unirl.core.names import did_you_mean

from . import aime, dapo_math, gedit_bench, geometry3k, gsm8k, magicbrush
from .example import PromptSet

__all__ = ["SETS", "prompt_set"]

SETS = {
    one.name: one
    for one in (
        aime.AIME,
        dapo_math.DAPO_MATH_17K,
        gedit_bench.GEDIT_BENCH,
        geometry3k.GEOMETRY3K,
        gsm8k.GSM8K,
        magicbrush.MAGICBRUSH,
    )
}


def prompt_set(name: str) -> PromptSet:
    """Raises DataError for a name that none has."""
    if name not in SETS:
        hint = did_you_mean(name, SETS) or "."
        raise DataError(f"got set {name!r}, expected one of {', '.join(SETS)}{hint}")
    return SETS[name]
