"""Cheap samples choose which ones are drawn exactly: the choice, the requests, the metrics and the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loop_toy import PARTS, Light, ToyBackend, ToyEngine, ToyModel, parts, plan, prompts, run
from plans import changed
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.capability import Needs
from unirl.core.specs.config import ScoutsConfig
from unirl.core.specs.plan import Plan
from unirl.core.specs.spec import AlgorithmSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Status, Track
from unirl.loop.announce import predicted_costs
from unirl.loop.parts import Parts
from unirl.loop.scouts import chosen_by, scout_metrics

NONE = float("nan")


def scored(groups: dict[str, Sequence[float]]) -> Track:
    """A track with these rewards, sample ids `group/number`; NaN is no score."""
    names = [group for group, rewards in groups.items() for _ in rewards]
    rewards = torch.tensor([reward for each in groups.values() for reward in each])
    return Track(
        name="image",
        sample_ids=tuple(f"{group}/{number}" for group, each in groups.items() for number in range(len(each))),
        group_ids=tuple(names),
        inputs=Inputs.of_texts(names),
        metadata=({},) * len(names),
        sample_weights=(~rewards.isnan()).float(),
        status=(Status.COMPLETED,) * len(names),
        policy_version=(0,) * len(names),
        rewards=rewards,
    )


@pytest.mark.parametrize(
    ("count", "rewards", "expected"),
    [
        (4, [3, 0, 5, 1, 4, 2], {1, 3, 4, 2}),
        # The odd one is among the best.
        (3, [3, 0, 5, 1, 4, 2], {1, 4, 2}),
        # Equal rewards: the lower ids are the worst, the higher ones the best.
        (2, [1, 1, 1, 1], {0, 3}),
        (2, [0, 1, 1, 0], {0, 2}),
        # What has no score is not chosen.
        (2, [NONE, 2, 7, 5, NONE], {1, 2}),
    ],
)
def test_half_of_the_chosen_are_the_best_and_half_the_worst(
    count: int, rewards: list[float], expected: set[int]
) -> None:
    other = [float(-reward) for reward in rewards]
    result = chosen_by(scored({"a": rewards, "b": other}), count=count)
    assert {int(sample[2:]) for sample in result if sample.startswith("a")} == expected
    assert sum(sample.startswith("b") for sample in result) == count, "each group is ranked by itself"


@pytest.mark.parametrize("rewards", [[1, NONE, NONE, 2], [NONE] * 4])
def test_a_group_with_too_few_scores_ends_the_step(rewards: list[float]) -> None:
    known = sum(reward == reward for reward in rewards)
    says = rf"data.scouts: {known} of the 4 scouts of group 'b' have a score of every reward, expected 3 or more"
    with pytest.raises(RewardFailed, match=says):
        chosen_by(scored({"a": [1, 2, 3, 4], "b": rewards}), count=3)


def test_rank_correlation_is_spearmans_within_prompts() -> None:
    """By 1 - 6 sum(d^2) / (n (n^2 - 1)): d = 1, 1, 0, 0 gives 0.8, reversed ranks -1."""
    track = scored({"a": [10, 20, 30, 40], "b": [9, 8, 7, 6], "flat": [5, 5, 5, 5]})
    scouts = {"a": [2, 1, 3, 4], "b": [1, 2, 3, 4], "flat": [1, 2, 3, 4], "unused": [100]}
    rewards = {f"{group}/{n}": float(value) for group, each in scouts.items() for n, value in enumerate(each)}
    metrics = scout_metrics(rewards, {"image": track})
    assert metrics["scouts/rank_correlation"] == pytest.approx((0.8 - 1) / 2, abs=1e-12)
    assert metrics["scouts/reward_mean"] == pytest.approx((3 * 10 + 100) / 13)
    alone = scout_metrics(rewards, {"image": scored({"flat": [5, 5, NONE, 5]})})
    assert list(alone) == ["scouts/reward_mean"], "there is no correlation with a constant"
    assert scout_metrics({}, {"image": track}) == {}


class Scheduled(ToyModel):
    """As many denoise steps as are asked for."""

    def schedule(self, sampling: LatentSamplingConfig) -> torch.Tensor:
        return torch.linspace(1, 0, sampling.num_inference_steps + 1)


class ByNumber(Light):
    """Samples 1 and 4 are the worst and the best of a prompt as scouts; the exact ones are scored 7 by 7."""

    def score(self, samples: ScoreInput) -> Scores:
        numbers = [int(sample.rsplit("/", 1)[1]) for sample in samples.sample_ids]
        self.seen = [*getattr(self, "seen", []), numbers]
        values = [{1: -1.0, 4: 9.0}.get(number, 5.0) for number in numbers] if len(self.seen) % 2 else [7.0, 8.0] * 2
        return Scores(values=torch.tensor(values), parts={"group": torch.zeros(len(values))})


def toy(*, samples: int = 6, **given: Any) -> Plan:
    """2 prompts, 2 exact samples of each in 4 steps, chosen by `samples` scouts in 2."""
    base = plan(groups=2, samples=2, run={"max_steps": 1})
    algorithm = base.only.parts["algorithm"]
    algorithm = dataclasses.replace(
        algorithm, spec=AlgorithmSpec(name="toy", needs=Needs(trajectory="window", log_probs="gaussian"), **PARTS)
    )
    scouts = ScoutsConfig(samples_per_prompt=samples, num_inference_steps=2)
    sampling = LatentSamplingConfig(num_inference_steps=4)
    data = dataclasses.replace(base.data, scouts=scouts, **given)
    return changed(base, algorithm=algorithm, data=data, sampling=sampling)


def scouting(**given: Any) -> Parts:
    return dataclasses.replace(parts(**given), models={"": Scheduled()})


def numbers(request: Request) -> list[str]:
    return [sample.removeprefix("r0/") for sample in request.sample_ids]


def test_scouts_are_scored_and_the_chosen_alone_are_drawn_again_and_trained_on() -> None:
    engine, backend, reward = ToyEngine(), ToyBackend(), ByNumber()
    ran = run(scouting(engine=engine, backend=backend, rewards={"light": reward}), toy())
    scouts, exact = engine.requests
    assert numbers(scouts) == [f"p{prompt}/{number}" for prompt in range(2) for number in range(6)]
    assert numbers(exact) == ["p0/1", "p0/4", "p1/1", "p1/4"]
    assert [len(request.latent.sigmas) - 1 for request in engine.requests] == [2, 4]
    assert scouts.latent.scored_steps.shape[1] == 0, "no log-probs of scouts"
    assert exact.latent.scored_steps.shape[1] == 4
    (track,) = backend.trained
    assert track.sample_ids == exact.sample_ids
    assert track.rewards is not None and track.rewards.tolist() == [7, 8, 7, 8], "rewards of the exact samples"
    (step,) = ran.steps
    metrics = step.data["metrics"]
    assert metrics["scouts/reward_mean"] == pytest.approx((4 * 5 + 9 - 1) / 6)
    assert metrics["scouts/rank_correlation"] == pytest.approx(1)
    assert metrics["reward_mean"] == 7.5 and step.data["samples"] == 4


def test_a_round_of_dynamic_sampling_has_scouts_of_its_own() -> None:
    class FlatFirst(ByNumber):
        def score(self, samples: ScoreInput) -> Scores:
            result = super().score(samples)
            flat = torch.tensor([group.endswith("p0") for group in samples.group_ids])
            values = result.values[: len(samples.group_ids)]
            return Scores(values=values.where(~flat, 5.0), parts={"group": torch.zeros(len(values))})

    engine = ToyEngine()
    made = scouting(engine=engine, rewards={"light": FlatFirst()})
    ran = run(made, toy(dynamic_sampling_rounds=3))
    counts = [request.num_rows for request in engine.requests]
    prompts = [len(set(request.group_ids)) for request in engine.requests]
    assert counts == [6 * prompts[0], 2 * prompts[0], 6 * prompts[2], 2 * prompts[2]]
    metrics = ran.steps[0].data["metrics"]
    assert metrics["groups_drawn"] == prompts[0] + prompts[2] and metrics["groups_without_spread"] == 1


def test_the_predicted_cost_has_the_rows_of_scouts() -> None:
    costs = [predicted_costs(each, scouting(), prompts(2), None) for each in (toy(), toy(samples=0))]
    # 2 prompts x 2 exact samples x 4 steps, and 2 x 6 scouts x 2 steps.
    assert [cost["image"]["rollout_rows"] for cost in costs] == [2 * 2 * 4 + 2 * 6 * 2, 2 * 2 * 4]
    for name in ("train_rows", "old_log_prob_rows", "stored_bytes"):
        assert costs[0]["image"][name] == costs[1]["image"][name]
