"""The transport `worker-store`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.limits import Reason
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TransportSpec

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = ["WORKER_STORE", "unirl_check_plan", "unirl_transports"]

WORKER_STORE = TransportSpec(
    name="worker-store",
    summary="Tensors stay in the worker that produced them; other workers fetch samples from it",
    build="unirl.transfer.tensor_store:build",
    config="unirl.transfer.config:WorkerStoreConfig",
)


@hookimpl
def unirl_transports() -> Iterable[TransportSpec]:
    return [WORKER_STORE]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[Reason]:
    if plan.transport is not None and (plan.launcher is None or plan.launcher.name == "local"):
        text = f"{plan.transport.name!r} has no effect within one process; remove it, or choose launcher=ray."
        return [Reason(key="transport", text=text)]
    return []
