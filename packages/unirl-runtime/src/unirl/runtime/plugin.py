"""The launchers that this dist provides, and the command that makes the environments of engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, cast

from unirl.core.capability import Cap, Support
from unirl.core.hookspec import hookimpl
from unirl.core.spec import EngineSpec, LauncherSpec, TransportSpec

from .config import RayConfig, misplaced

if TYPE_CHECKING:
    import click
    from unirl.core.plan import Choice, Plan

__all__ = ["LOCAL", "RAY", "WORKER_STORE", "unirl_check_plan", "unirl_commands", "unirl_launchers", "unirl_transports"]

LOCAL = LauncherSpec(
    name="local",
    summary="Everything in this process, where a debugger can look at it",
    build="unirl.runtime.launchers:build_local",
    config="unirl.runtime.config:LocalConfig",
)
RAY = LauncherSpec(
    name="ray",
    summary="Train ranks, rollout workers and reward workers placed on devices and machines by Ray",
    build="unirl.runtime.launchers:build_ray",
    config="unirl.runtime.config:RayConfig",
    separates={"placement": "separate"},
    holds_reference={"reference": "separate"},
    look="unirl.runtime.cluster_check:look",
)
WORKER_STORE = TransportSpec(
    name="worker-store",
    summary="Tensors stay in the worker that made them; who needs rows asks it",
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
    from .engine_host.command import command

    cli.add_command(command)


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    if plan.transport is not None and (plan.launcher is None or plan.launcher.name == LOCAL.name):
        return [
            f"transport: {plan.transport.name!r} was asked for, and nothing travels within one process; leave it out, "
            "or choose launcher=ray."
        ]
    if plan.launcher is None or plan.launcher.name != RAY.name:
        return []
    config = cast(RayConfig, plan.launcher.config)
    reasons = list(misplaced(config, device=plan.run.device))
    if config.placement == "colocate":
        reasons += _memory_kept(plan.engine)
    engine = plan.engine.spec
    if config.placement == "trainside" and engine.support(Cap.WEIGHTS_SHARED) is not Support.NATIVE:
        reasons.append(
            f"launcher.placement: 'trainside' was asked for, where each train rank samples with the module that it "
            f"trains; engine {engine.name!r} has weights of its own, and nobody would send it those that train. Use "
            "separate, or colocate."
        )
    return reasons


def _memory_kept(engine: Choice[EngineSpec]) -> Iterator[str]:
    """Why an engine would keep the memory of a device that it has in turn with training."""
    spec = engine.spec
    if Support.NATIVE not in (spec.support(Cap.SLEEP), spec.support(Cap.WEIGHTS_SHARED)):
        yield (
            f"launcher.placement: 'colocate' was asked for; engine {spec.name!r} cannot sleep, so its memory stays "
            "taken while its device trains. Use separate."
        )
    for key, wanted in spec.enabled_by.get(Cap.SLEEP, {}).items():
        found = reduce(getattr, key.split("."), engine.config)
        if found != wanted:
            yield (
                f"engine.{key}: {json.dumps(found)} was asked for, and launcher.placement=colocate lets training have "
                f"the memory in turn; set engine.{key}={json.dumps(wanted)}."
            )
