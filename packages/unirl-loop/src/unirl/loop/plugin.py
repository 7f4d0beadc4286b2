"""The launcher `local`, and the commands `train` and `sweep`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import LauncherSpec

if TYPE_CHECKING:
    import click

__all__ = ["LOCAL", "unirl_commands", "unirl_launchers"]

LOCAL = LauncherSpec(
    name="local",
    summary="Runs everything in this process, easy to debug",
    build="unirl.loop.local_launcher:build",
    config="unirl.loop.config:LocalConfig",
)


@hookimpl
def unirl_launchers() -> Iterable[LauncherSpec]:
    return [LOCAL]


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from .cli.train import command as train

    cli.add_command(train)
