"""The launcher `local`."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import LauncherSpec

__all__ = ["LOCAL", "unirl_launchers"]

LOCAL = LauncherSpec(
    name="local",
    summary="Runs everything in this process, easy to debug",
    build="unirl.loop.local_launcher:build",
    config="unirl.loop.config:LocalConfig",
)


@hookimpl
def unirl_launchers() -> Iterable[LauncherSpec]:
    return [LOCAL]
