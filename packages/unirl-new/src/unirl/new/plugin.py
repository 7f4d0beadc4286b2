"""Provides the command `unirl new`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["unirl_commands"]


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from unirl.new.command import new

    cli.add_command(new)
