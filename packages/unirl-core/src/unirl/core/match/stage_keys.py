"""Key paths of settings that stages have of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["of_stage", "placed_key"]


def of_stage(plan: Plan, stage: Stage) -> Callable[[str], str]:
    """Config path of a section -> key path of this stage's values of it."""

    def at(section: str) -> str:
        if len(plan.stages) == 1:
            return section
        if section == "sampling":
            return f"sampling.{stage.name}"
        return f"stages.{stage.name}.{section}" if getattr(stage.settings, section) else section

    return at


def placed_key(key: str, plan: Plan, stage: Stage) -> str:
    """Key of a stage's setting, given that of a recipe with this stage alone, which is all that a part knows."""
    lead = "eval." if key.startswith("eval.sampling") else ""
    section, dot, rest = key.removeprefix(lead).partition(".")
    known = section in ("sampling", "advantage", "train")
    return f"{lead}{of_stage(plan, stage)(section)}{dot}{rest}" if known else key
