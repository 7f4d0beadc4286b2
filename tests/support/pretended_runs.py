"""Steps of recipes on the pretended device. Call them in a process of its own, see `pretended_device`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from pretended_device import NAME, PretendedDevice, pretended_device
from unirl.core.data.run_data import read_data
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.loop.build import built_parts
from unirl.loop.step import run_step

__all__ = ["pretended_step"]


@cache
def _catalog() -> Catalog:
    return Catalog.discover()


def pretended_step(
    recipe: str, words: Sequence[str], *, directory: Path | None = None
) -> tuple[Mapping[str, float], PretendedDevice]:
    """The metrics of a recipe's first step, and what it did on the device, without that of building its parts.

    A checkpoint is not written: torch stores no tensors of such a device.  directory: where to look for `./recipes`.
    """
    torch.set_num_threads(1)
    words = [*words, "run.device=cpu"]
    plan = compose(recipe, words, catalog=_catalog(), directory=directory)
    if more := list(_unsharded(plan)):
        plan = compose(recipe, [*words, *more], catalog=_catalog(), directory=directory)
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, device=NAME))
    prompts = read_data(plan).prompts[: plan.data.prompts_per_step]
    events, emitted = EventStream(), list[Event]()
    events.listen(emitted.append)
    with pretended_device() as device, built_parts(plan, catalog=_catalog()) as parts:
        device.syncs.clear()
        device.transfers.clear()
        run_step(parts, plan, prompts, step=0, events=events, trackers=Trackers({}, events))
    (metrics,) = (event.data["metrics"] for event in emitted if event.kind == "step")
    return metrics, device


def _unsharded(plan: Plan) -> Iterator[str]:
    """Overrides for 16 bits without a group of ranks, which has no collectives on this device."""
    for learner in plan.learners.values():
        if learner.backend is not None and learner.backend.config.mixed_precision != "none":
            yield from (f"{learner.backend.key}.mixed_precision=none", f"{learner.model.key}.autocast=bfloat16")
