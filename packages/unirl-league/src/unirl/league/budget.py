"""Budget of every run of a league, and the costs that count towards it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from unirl.core.errors import RecipeError

__all__ = ["UNITS", "Budget", "Spent", "parse_budget"]

UNITS = {
    "s": ("cpu_s", "CPU seconds"),
    "wall": ("wall_s", "seconds of wall time"),
    "steps": ("steps", "steps"),
    "samples": ("samples", "samples"),
    "forwards": ("forwards", "forwards"),
}
"""Ending of a budget -> the field of `Spent` that it bounds, and its name."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Costs of training up to a step. Loading and evaluation do not count."""

    steps: int = 0
    samples: int = 0
    """Generated for training."""
    forwards: int = 0
    """Rows through the trainable module; tokens, for a text model."""
    backwards: int = 0
    """Rows, or tokens, whose output got a gradient."""
    cpu_s: float = 0.0
    """CPU time of the process, all threads."""
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    amount: float
    unit: str
    """A key of `UNITS`."""

    @property
    def field(self) -> str:
        """The field of `Spent` that it bounds."""
        return UNITS[self.unit][0]

    def of(self, spent: Spent) -> float:
        """The share of the budget that is spent; 1 and more is all of it."""
        return float(asdict(spent)[self.field]) / self.amount

    def __str__(self) -> str:
        return f"{self.amount:g} {UNITS[self.unit][1]}"


def parse_budget(text: str) -> Budget:
    """`120s`, `300wall`, `40steps`, `2000samples` or `20000forwards`. Raises RecipeError for anything else."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    if result is None or result[2] not in UNITS or not float(result[1]):
        raise RecipeError(
            f"--budget: got {text!r}, expected a number above 0 and one of {', '.join(UNITS)}: `120s` (CPU seconds), "
            "`300wall`, `40steps`, `2000samples`, `20000forwards`."
        )
    return Budget(amount=float(result[1]), unit=result[2])
