"""The check of a plan's SDE kernels and guidances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.limits import Reason
from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = ["unirl_check_plan"]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[Reason]:
    from .diffusion.plan_check import plan_problems

    return plan_problems(plan)
