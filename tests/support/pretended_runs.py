"""Steps of recipes on the pretended device. Call them in a process of its own, see `pretended_device`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from miniature_recipes import STAND_INS, miniature_words
from pretended_device import NAME, PretendedDevice, pretended_device
from unirl.conformance.part_factory import PartFactory
from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError, RecipeError, RewardFailed
from unirl.core.match.match import match
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog, Found
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.core.specs.spec import AlgorithmSpec, ModelSpec
from unirl.core.types.event import Event
from unirl.loop.build import built_parts
from unirl.loop.run_plan import with_run_folder
from unirl.loop.step import run_step

__all__ = ["ROOT", "Step", "recipe_step", "statements", "step_with_part"]

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("quickstart", "quickstart-text", "quickstart-vl", "quickstart-video", "quickstart-i2v", "quickstart-edit")
"""Recipes that a part without one is tried in; the first that takes it."""

WORDS = {
    "dr-grpo": ("algorithm.max_length='${sampling.max_new_tokens}'",),
    # Names of Wan's layers.
    "hunyuan-video15-i2v": ("backend.lora.targets=[]",),
    # Random weights get one score for all of their answers.
    "qwen25-vl": tuple(word.replace("standin", "sized") for word in STAND_INS["math"]),
}
"""Further overrides of a host that a part needs."""

Step = tuple[Mapping[str, float], PretendedDevice]


def statements(code: str) -> PretendedDevice:
    """What these do, with `x` on the device, [3, 4] of 0 to 11."""
    with pretended_device() as device:
        x = torch.arange(12.0, device=NAME).view(3, 4)
        exec(code, {"torch": torch, "x": x})
    return device


def recipe_step(name: str, folder: Path, *words: str) -> Step:
    """The metrics of the first step of a recipe on its miniature, and what it did on the device, without that of
    building its parts.

    A checkpoint is not written: torch stores no tensors of such a device.  folder: for miniatures, which are kept.
    """
    factory = _factory(folder)
    own = miniature_words(name, factory, Path(tempfile.mkdtemp(dir=folder)), directory=ROOT)
    # The device is pretended in one thread: rewards that overlap with generation are scored in another.
    return _step(_plan(name, [*own, "run.reward_overlap_groups=0", *words], factory))


def step_with_part(kind: str, name: str, folder: Path) -> Step:
    """The same for the first of `HOSTS` that takes a model, an algorithm or a reward."""
    factory, refusals = _factory(folder), list[str]()
    found = next(one for one in factory.catalog.parts() if (one.spec.kind, one.spec.name) == (kind, name))
    for host in HOSTS:
        own = miniature_words(host, factory, Path(tempfile.mkdtemp(dir=folder)), directory=ROOT)
        try:
            plan = _plan(host, [*own, *_words(found, factory)], factory)
            verdict = match(plan, catalog=factory.catalog)
            if verdict.accepted:
                return _step(plan)
            refusals.append(f"{host}: {'; '.join(map(str, verdict.reasons))}")
        except (RecipeError, DataError, RewardFailed) as error:
            if any(isinstance(one, RuntimeError) for one in _causes(error)):
                raise
            # Its samples may lack what the part reads of them.
            refusals.append(f"{host}: {error}")
    raise AssertionError("\n".join([f"{kind} {name!r} fits in none of these recipes:", *refusals]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@cache
def _factory(folder: Path) -> PartFactory:
    return PartFactory(Catalog.discover(), folder)


def _step(plan: Plan) -> Step:
    torch.set_num_threads(1)
    catalog = Catalog.discover()
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, device=NAME))
    prompts = read_data(plan).prompts[: plan.data.prompts_per_step]
    events, emitted = EventStream(), list[Event]()
    events.listen(emitted.append)
    with tempfile.TemporaryDirectory() as folder, pretended_device() as device:
        # Stages that see drawings of their parents read them from there.
        plan = with_run_folder(plan, Path(folder))
        with built_parts(plan, catalog=catalog) as parts:
            device.syncs.clear()
            device.transfers.clear()
            run_step(parts, plan, prompts, step=0, events=events, trackers=Trackers({}, events))
    (metrics,) = (event.data["metrics"] for event in emitted if event.kind == "step")
    return metrics, device


def _plan(recipe: str, words: Sequence[str], factory: PartFactory) -> Plan:
    plan = compose(recipe, words, catalog=factory.catalog, directory=ROOT)
    if more := list(_unsharded(plan)):
        plan = compose(recipe, [*words, *more], catalog=factory.catalog, directory=ROOT)
    return plan


def _unsharded(plan: Plan) -> Iterator[str]:
    """Overrides for 16 bits without a group of ranks, which has no collectives on this device."""
    for learner in plan.learners.values():
        if learner.backend is not None and learner.backend.config.mixed_precision != "none":
            yield from (f"{learner.backend.key}.mixed_precision=none", f"{learner.model.key}.autocast=bfloat16")


def _words(found: Found, factory: PartFactory) -> Iterator[str]:
    """Overrides that put a part into a recipe."""
    spec: Any = found.spec
    settings: dict[str, Any] = {**found.spec.trial}
    key: str = spec.kind
    if isinstance(spec, ModelSpec):
        yield f"model={spec.name}"
        settings["path"] = factory.checkpoint(found)
    elif isinstance(spec, AlgorithmSpec):
        yield f"algorithm={spec.name}"
        if spec.needs.critic:
            yield from ("backend.critic.lr=1e-3", "backend.critic.warmup_steps=0")
        if spec.needs.fake_score:
            yield "backend.fake_score.lr=1e-3"
    else:
        key = "reward.tried"
        yield f"+reward@{key}={spec.name}"
        settings |= factory.reward_files(found)
    yield from (f"{key}.{name}={value}" for name, value in settings.items())
    yield from WORDS.get(spec.name, ())
