"""`unirl doctor`, `unirl export` and `unirl plan`, and a note on runs that ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    import click
    from unirl.core.specs.plan import Plan

__all__ = ["unirl_commands", "unirl_explain_failure"]


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from .doctor_command import command as doctor
    from .export.command import command as export
    from .plan.command import command as plan

    cli.add_command(doctor)
    cli.add_command(export)
    cli.add_command(plan)


@hookimpl
def unirl_explain_failure(plan: Plan, error: BaseException) -> str:
    from .plan.out_of_memory import explanation

    return explanation(plan, error)
