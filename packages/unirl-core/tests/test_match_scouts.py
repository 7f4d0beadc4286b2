"""Scouts: what they can choose for, and which settings stand in the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plans import changed
from toy_specs import ALGORITHM, ENGINE, MODEL, make_plan, refusals, without
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import DataConfig, RunConfig, ScoutsConfig
from unirl.core.specs.leaves import plan_hash
from unirl.core.specs.plan import Plan
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig

COUNT, STEPS = "data.scouts.samples_per_prompt", "data.scouts.num_inference_steps"


def scouted(samples: int = 24, steps: int = 4, *, exact: int = 8, rounds: int = 0, **changes: Any) -> Plan:
    """A plan with 10 denoise steps."""
    scouts = ScoutsConfig(samples_per_prompt=samples, num_inference_steps=steps)
    data = DataConfig(train="prompts.txt", samples_per_prompt=exact, scouts=scouts, dynamic_sampling_rounds=rounds)
    return changed(make_plan(**changes), data=data)


def test_scouts_go_with_a_latent_stage_and_with_dynamic_sampling() -> None:
    assert refusals(scouted()) == []
    assert refusals(scouted(rounds=2)) == []
    assert refusals(scouted(samples=9, steps=9)) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"samples": 8}, f"{COUNT}: got 8, expected more than 8, the samples to choose (data.samples_per_prompt)."),
        ({"samples": -1}, f"{COUNT}: got -1, expected 0 to 1000000."),
        ({"samples": 0}, f"{STEPS}: got 4 without scouts; set {COUNT} as well, or leave it out."),
        ({"steps": 0}, f"{STEPS}: got 0, expected 1 to 9, fewer steps than an exact sample takes"),
        ({"steps": 10}, f"{STEPS}: got 10, expected 1 to 9, fewer steps than an exact sample takes"),
        ({"run": RunConfig(reward_overlap_groups=2)}, f"run.reward_overlap_groups: got 2 with {COUNT}=24; exact"),
        ({"engine": without(ENGINE, Cap.INITIAL_NOISE)}, f"engine: {COUNT} needs 'initial-noise'; engine 'inside'"),
        (
            {"engine": dataclasses.replace(ENGINE, samples={"image": "image"})},
            f"{COUNT}: got 24, but engine 'inside' reads stored samples and draws none. Use 0.",
        ),
        (
            {"algorithm": dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="none"))},
            f"{COUNT}: got 24, but algorithm 'grpo-like' does not compare the rewards of a group",
        ),
        (
            {"sampling": LatentSamplingConfig(same_initial_noise=True)},
            f"sampling.same_initial_noise: got true, so all scouts of a prompt ({COUNT}) would be the same sample.",
        ),
        (
            {
                "sampling": LatentSamplingConfig(
                    same_initial_noise=True, sde=SdeStepsConfig(branch_steps=[0, 1, 2], branch_factor=2)
                )
            },
            f"sampling.sde.branch_steps: got [0, 1, 2], which needs every path of a tree; scouts ({COUNT}) choose some.",
        ),
        (
            {"sampling": LatentSamplingConfig(sde=SdeStepsConfig(mode="fixed", steps=[0, 5]))},
            f"{STEPS}: got 4, which sampling.sde does not fit: step 5 is past the last step 3.",
        ),
        (
            {"sampling": LatentSamplingConfig(num_inference_steps=1)},
            f"{COUNT}: got 24, but sampling.num_inference_steps=1: no scout is cheaper. Use 0.",
        ),
    ],
)
def test_what_scouts_cannot_choose_for_is_refused(given: dict[str, Any], says: str) -> None:
    result = refusals(scouted(**given))
    assert any(line.startswith(says) for line in result), result
    without_scouts = refusals(changed(scouted(**given), data=DataConfig(train="prompts.txt")))
    assert not any(line.startswith(says) for line in without_scouts)


def test_rollouts_ahead_are_refused() -> None:
    (line,) = [line for line in refusals(scouted(run=RunConfig(max_staleness=1))) if COUNT in line]
    assert line.startswith(f"run.max_staleness: got 1 with {COUNT}=24; exact samples wait for the rewards of all")


def test_a_recipe_of_several_stages_is_refused() -> None:
    plan = scouted()
    other = dataclasses.replace(plan.only, name="second")
    lines = refusals(dataclasses.replace(plan, stages=(plan.only, other)))
    assert f"{COUNT}: got 24, expected 0 in a recipe of several stages (image, second)." in lines


def test_a_text_stage_is_refused() -> None:
    plan = scouted(model=dataclasses.replace(MODEL, tracks={"image": "text"}), sampling=TextSamplingConfig())
    assert any(line.startswith(f"{COUNT}: got 24, but track 'image' is text") for line in refusals(plan))


def test_without_scouts_a_plan_has_the_hash_of_one_from_before_there_were_any() -> None:
    plan = make_plan()
    off = {"data": {"train": "a.txt", "scouts": {"samples_per_prompt": 0, "num_inference_steps": 0}}}
    on = {"data": {"train": "a.txt", "scouts": {"samples_per_prompt": 9, "num_inference_steps": 4}}}
    before, *hashes = (plan_hash(plan.numeric_leaves(each)) for each in ({"data": {"train": "a.txt"}}, off, on))
    assert [before == each for each in hashes] == [True, False]
