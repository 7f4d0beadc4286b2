"""Provides the command `unirl conformance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["unirl_commands"]


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from .command import conformance

    cli.add_command(conformance)
