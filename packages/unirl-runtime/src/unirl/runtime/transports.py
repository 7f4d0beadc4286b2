"""The transport of a plan, in whichever process of a run."""

from __future__ import annotations

from unirl.core.catalog import Catalog
from unirl.core.config import PartConfig
from unirl.core.parts import attributed
from unirl.core.plan import Plan
from unirl.core.roles import Transport, TransportPlace

from . import tensor_store

__all__ = ["make_transport"]


def make_transport(plan: Plan, *, place: TransportPlace) -> Transport:
    """The transport that the plan names, or else the store that asks the workers. Raises what its build raises."""
    if plan.transport is None:
        return tensor_store.build(PartConfig(), place=place)
    with attributed(f"transport {plan.transport.name!r} in {place.process!r}", phase="build"):
        return Catalog.of({}).resolve(plan.transport.spec.build)(plan.transport.config, place=place)
