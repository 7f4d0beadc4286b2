"""Rewards of SDE steps: which parts can give them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from toy_specs import ALGORITHM, ENGINE, REWARD, Algorithm, having, make_plan, refusals
from unirl.core.match.match import match
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.part_config import GateConfig
from unirl.core.specs.plan import Plan

KEY = "algorithm.step_rewards"
PAIRWISE = dataclasses.replace(REWARD, name="judge", capabilities={Cap.REWARD_GROUP})


@dataclass
class Stepwise(Algorithm):
    step_rewards: bool = True


def stepwise(*, is_on: bool = True, **changes: Any) -> Plan:
    algorithm = dataclasses.replace(ALGORITHM, when={"step_rewards": Needs(step_rewards=True)})
    given = {"engine": having(ENGINE, Cap.SDE_STEPS_PER_GROUP), **changes}
    return make_plan(algorithm=algorithm, algorithm_config=Stepwise(step_rewards=is_on), **given)


def test_rewards_of_single_samples_give_steps_theirs() -> None:
    assert refusals(stepwise()) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": ENGINE}, f"engine: {KEY} needs 'sde-steps-per-group'; engine 'inside' does not provide it."),
        (
            {"reward.score": PAIRWISE},
            f"{KEY}: got true, but reward 'judge' (reward.score) scores the samples of a group against each other",
        ),
    ],
)
def test_what_steps_cannot_be_scored_with_is_refused(given: dict[str, Any], says: str) -> None:
    result = refusals(stepwise(**given))
    assert any(line.startswith(says) for line in result), result
    assert not any(KEY in line for line in refusals(stepwise(is_on=False, **given)))


def test_a_group_reward_that_is_only_watched_does_not_matter() -> None:
    plan = stepwise(**{"reward.score": REWARD})
    watched = dataclasses.replace(plan.rewards["score"], spec=PAIRWISE)
    watched = dataclasses.replace(watched, config=dataclasses.replace(watched.config, weight=0.0))
    both = dataclasses.replace(plan, rewards={**plan.rewards, "watched": watched})
    both = both.with_stages(lambda stage: dataclasses.replace(stage, rewards=("score", "watched")))
    assert not any(reason.key == KEY for reason in match(both).reasons)
    score = plan.rewards["score"]
    gated = dataclasses.replace(score, config=dataclasses.replace(score.config, gate=GateConfig("watched", 0.5)))
    both = dataclasses.replace(both, rewards={"score": gated, "watched": watched})
    assert any(reason.key == KEY for reason in match(both).reasons), "as a gate it counts"


def test_several_stages_are_refused() -> None:
    plan = stepwise()
    two = dataclasses.replace(plan, stages=(plan.only, dataclasses.replace(plan.only, name="other")))
    expected = f"{KEY}: got true, expected false in a recipe of several stages (image, other)."
    assert expected in [str(reason) for reason in match(two).reasons]
