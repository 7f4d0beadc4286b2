"""The launchers and transports of this dist, `unirl doctor`, `unirl export` and `unirl plan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.limits import Reason
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import LauncherSpec, TransportSpec

if TYPE_CHECKING:
    import click
    from unirl.core.specs.plan import Plan

__all__ = ["LOCAL", "RAY", "WORKER_STORE", "unirl_check_plan", "unirl_commands", "unirl_launchers", "unirl_transports"]

LOCAL = LauncherSpec(
    name="local",
    summary="Runs everything in this process, easy to debug",
    build="unirl.runtime.local_launcher:build",
    config="unirl.runtime.config:LocalConfig",
)
RAY = LauncherSpec(
    name="ray",
    summary="Train ranks, rollout workers and reward workers placed on devices and machines by Ray",
    build="unirl.runtime.ray_launcher:build",
    config="unirl.runtime.config:RayConfig",
    separates={"placement": "separate"},
    holds_reference={"reference": "separate"},
    look="unirl.runtime.cluster_check:look",
)
WORKER_STORE = TransportSpec(
    name="worker-store",
    summary="Tensors stay in the worker that produced them; other workers fetch samples from it",
    build="unirl.runtime.tensor_store:build",
    config="unirl.runtime.config:WorkerStoreConfig",
)


@hookimpl
def unirl_launchers() -> Iterable[LauncherSpec]:
    return [LOCAL, RAY]


@hookimpl
def unirl_transports() -> Iterable[TransportSpec]:
    return [WORKER_STORE]


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from .doctor_command import command as doctor
    from .export.command import command as export
    from .plan_command import command as plan

    cli.add_command(doctor)
    cli.add_command(export)
    cli.add_command(plan)


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[Reason]:
    if plan.transport is not None and (plan.launcher is None or plan.launcher.name == LOCAL.name):
        text = f"{plan.transport.name!r} has no effect within one process; remove it, or choose launcher=ray."
        return [Reason(key="transport", text=text)]
    return []
