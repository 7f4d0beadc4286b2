"""The launcher `ray`."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import LauncherSpec

__all__ = ["RAY", "unirl_launchers"]

RAY = LauncherSpec(
    name="ray",
    summary="Train ranks, rollout workers and reward workers placed on devices and machines by Ray",
    build="unirl.launchers.ray.launcher:build",
    config="unirl.launchers.ray.config:RayConfig",
    separates={"placement": "separate"},
    holds_reference={"reference": "separate"},
    look="unirl.launchers.ray.cluster_check:look",
)


@hookimpl
def unirl_launchers() -> Iterable[LauncherSpec]:
    return [RAY]
