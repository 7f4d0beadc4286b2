"""Does it learn?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.algorithm import AlgorithmCase
from unirl.conformance.verdicts import NotApplicable, NotRun
from unirl.core.data.prompts import read_prompts
from unirl.core.errors import PluginNotFound
from unirl.core.match.match import match
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.recipe.compose import compose
from unirl.core.recipe.files import list_recipes, recipe_roots
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.loop.build import build_parts
from unirl.loop.step import run_step

RECIPE = "quickstart"
STEPS = 24
PROMPTS = 4
BUDGET = (
    "~tracker@tracker.report",
    "run.media_every=0",
    f"data.prompts_per_step={PROMPTS}",
    "data.samples_per_prompt=24",
    "sampling.num_inference_steps=5",
    # AdamW's first step is as long as its learning rate, whatever the gradient; four short ones go as far and stay on
    # the way.
    "backend.lr=5e-5",
    f"run.max_steps={STEPS}",
)


DIFFERENTIABLE = ("~reward@reward.shapes", "+reward@reward.soft=soft-shapes")
"""Replaces the recipe's reward, for an algorithm that backpropagates rewards."""
LAGGED = ("kind=linear", "rate=0.001", "decay=0.5")
"""Settings of a lagged policy that samples, as in the paper of DiffusionNFT; of the recipe's backend."""
CRITIC = ("backend.critic.lr=1e-3", "advantage.scope=group")
"""Settings of a critic, whose advantages are whitened by themselves."""


@claim("algorithm")
def test_training_raises_the_reward(case: AlgorithmCase) -> None:
    """It learns: on the quickstart's coloured shapes, with real parts, the mean reward of the last eight steps exceeds
    that of the first eight by more than three standard errors.

    The recipe `quickstart` with this algorithm instead of its own; four prompts, the same in every step, 96 samples,
    24 steps. Over four seeds Flow-GRPO rises by 7 to 10 standard errors.

    If it fails while the other claims hold: look at what only a run has: `progress` (schedules that end in nothing),
    state that is kept from step to step, and the default settings, which may not suit small latents; `setup` in the
    spec names those that do.
    """
    plan = _plan(case)
    verdict = match(plan, catalog=case.factory.catalog)
    if not verdict.accepted:
        raise NotApplicable(" ".join(str(reason) for reason in verdict.reasons))
    means, variances = _train(plan, case)
    samples = plan.data.prompts_per_step * plan.data.samples_per_prompt
    # The variances count the spread of the prompts, which are the same in every step.
    case.check_rise(means, variances, samples=samples)


def _plan(case: AlgorithmCase) -> Plan:
    """The recipe's plan with the algorithm under setup. Raises NotRun when the recipe or a part of it is absent."""
    roots = recipe_roots(case.folder)
    if RECIPE not in [recipe.name for recipe in list_recipes(roots)]:
        raise NotRun("the recipe 'quickstart' is not installed here; `pip install unirl-quickstart` brings it")
    needs = case.needs()
    if needs.reward == "none":
        raise NotApplicable(f"algorithm {case.spec.name!r} takes no rewards")
    reward = DIFFERENTIABLE if needs.reward == "differentiable" else ()
    overrides = [
        *BUDGET,
        *reward,
        f"run.device={case.device}",
        f"train.updates_per_step={4 if needs.multi_update else 1}",
        # Also where only the default settings ask for it.
        "backend.reference_copy=true",
        *(CRITIC if needs.critic else ()),
        *(() if needs.sampler == "live" else (f"backend.{needs.sampler}.{setting}" for setting in LAGGED)),
    ]

    def composed() -> Plan:
        return compose(RECIPE, overrides, catalog=case.factory.catalog, directory=case.folder)

    try:
        # Half a second, for what differs between algorithms in little.
        plan = case.factory.shared(f"recipe {RECIPE} {overrides}", composed)
    except PluginNotFound as error:
        raise NotRun(f"the recipe 'quickstart' needs a part that is not installed here: {error}") from error
    choice = case.factory.choice(case.found, case.factory.config(case.found))
    return plan.with_stages(lambda stage: dataclasses.replace(stage, algorithm=choice))


def _train(plan: Plan, case: AlgorithmCase) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and variance of the reward in every step."""
    prompts = read_prompts(Path(plan.data.train))
    chosen = [prompts[number * len(prompts) // PROMPTS] for number in range(PROMPTS)]
    steps: list[Event] = []
    events = EventStream(case.folder / "events.jsonl")
    events.listen(lambda event: steps.append(event) if event.kind == "step" else None)
    with _global_state():
        parts = build_parts(plan, catalog=case.factory.catalog)
        try:
            for step in range(plan.run.max_steps):
                run_step(parts, plan, chosen, step=step, events=events, trackers=Trackers({}, events))
        finally:
            events.close()
            for part in (parts.only.engine, *parts.rewards.values(), parts.only.backend):
                part.close()
    metrics = [step.data["metrics"] for step in steps]
    return [result["reward_mean"] for result in metrics], [result["reward_std"] ** 2 for result in metrics]


@contextmanager
def _global_state() -> Iterator[None]:
    """Restores what building a run changes in this process."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
