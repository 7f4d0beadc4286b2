"""Builds the transport of a plan, in any process of a run."""

from __future__ import annotations

from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Transport, TransportPlace
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Plan
from unirl.loop.parts import attributed
from unirl.transfer import tensor_store

__all__ = ["make_transport"]


def make_transport(plan: Plan, *, place: TransportPlace) -> Transport:
    """The plan's transport, by default the store on the workers. Raises what its build raises."""
    if plan.transport is None:
        return tensor_store.build(PartConfig(), place=place)
    with attributed(f"transport {plan.transport.name!r} in {place.process!r}", phase="build"):
        return Catalog.of({}).resolve(plan.transport.spec.build)(plan.transport.config, place=place)
