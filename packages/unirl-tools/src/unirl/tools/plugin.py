"""A note on runs that ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = ["unirl_explain_failure"]


@hookimpl
def unirl_explain_failure(plan: Plan, error: BaseException) -> str:
    from .plan.out_of_memory import explanation

    return explanation(plan, error)
