"""Several rewards become one: samples without a score, clipping, gates, and weights over the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loop_toy import Light, ToyBackend, parts, plan, prompts, run
from test_scoring_and_costs import make_track
from unirl.core.errors import RewardFailed
from unirl.core.match.match import match
from unirl.core.observe.caption import captions
from unirl.core.roles import Job, ScoreInput, Scores, TrainReport
from unirl.core.specs.part_config import GateConfig, RewardConfig
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import RewardSpec
from unirl.core.types.batch import same
from unirl.loop.scoring import MediaScore, counted_scores, mean_parts, score

NAN = math.nan


@dataclass
class Given:
    """A reward that gives these numbers."""

    values: Sequence[float]
    scored: Sequence[bool] | None = None
    parts: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=lambda: dict[str, Sequence[float]]())

    def score(self, samples: ScoreInput) -> Scores:
        return Scores(
            values=torch.tensor(self.values),
            parts={name: torch.tensor(values) for name, values in self.parts.items()},
            scored=None if self.scored is None else torch.tensor(self.scored),
        )

    def close(self) -> None: ...


def choice(key: str = "a", *, low: float = 0.0, high: float = 1.0, **settings: Any) -> Choice[RewardSpec, RewardConfig]:
    gate = settings.pop("gate", ("", None))
    spec = RewardSpec(
        name=key, summary="s", build="m:f", config="m:C", scale="s", range=(low, high), media="image", parts=()
    )
    config = RewardConfig(gate=GateConfig(reward=gate[0], at_least=gate[1]), **settings)
    return Choice(key=f"reward.{key}", spec=spec, config=config, dist="toy", version="1")


def rewarded(**choices: Choice[RewardSpec, RewardConfig]) -> Plan:
    toy = plan()
    stages = tuple(dataclasses.replace(stage, rewards=tuple(choices)) for stage in toy.stages)
    return dataclasses.replace(toy, rewards=choices, stages=stages)


def assert_equal(values: torch.Tensor | None, expected: Sequence[float]) -> None:
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_a_sample_without_a_score_has_weight_0_and_is_left_out_of_means() -> None:
    rewards = {
        "a": Given([1.0, NAN, 3.0, 9e9], [True, False, True, False], {"x": [2.0, math.inf, 4.0, 0.0]}),
        "b": Given([10.0, 20.0, 30.0, 40.0]),
    }
    track = score(make_track(), rewards, {"a": 1.0, "b": 0.1})
    assert_equal(track.rewards, [2.0, NAN, 6.0, NAN])
    assert_equal(track.sample_weights, [1.0, 0.0, 1.0, 0.0])
    assert mean_parts(track) == {"reward/a": 2.0, "reward/a/unscored": 0.5, "reward/a/x": 3.0, "reward/b": 25.0}
    assert [text.partition(" | ")[2] for text in captions(track)] == [
        "reward 2.00", "no score", "reward 6.00", "no score"
    ]  # fmt: skip


def test_a_reward_of_weight_0_takes_no_sample_out_of_training() -> None:
    rewards = {"a": Given([1.0, 2.0, 3.0, 4.0]), "b": Given([0.0, 5.0, 0.0, 1.0], [True, False, True, True])}
    track = score(make_track(), rewards, {"a": 1.0, "b": 0.0})
    assert_equal(track.rewards, [1.0, 2.0, 3.0, 4.0])
    assert_equal(track.sample_weights, [1.0] * 4)
    assert mean_parts(track)["reward/b/unscored"] == 0.25


class Silent(Light):
    """Light, without a score for the samples of a number or, if none is given, for all."""

    number: str = ""

    def score(self, samples: ScoreInput) -> Scores:
        scores = super().score(samples)
        scored = torch.tensor([not sample.endswith(self.number) for sample in samples.sample_ids])
        return dataclasses.replace(scores, values=scores.values.where(scored, NAN), scored=scored)


class SecondSilent(Silent):
    number = "/1"


class Counting(ToyBackend):
    """The toy, over the samples that count."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track = jobs[0].track
        rows = [row for row in range(track.num_rows) if float(track.sample_weights[row])]
        return super().train([dataclasses.replace(jobs[0], track=track.select(rows))], progress=progress)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_run_trains_and_evaluates_on_the_samples_with_a_score(pieces: int) -> None:
    """Each group of 3 lacks one; painted brightness is known from the ids, so means of the others are."""
    backend, toy = Counting(), plan(samples=3, run={"max_steps": 1, "reward_overlap_groups": pieces})
    toy = dataclasses.replace(toy, eval=dataclasses.replace(toy.eval, threshold=-1.0))
    ran = run(parts(backend=backend, rewards={"light": SecondSilent()}), toy, held_out=prompts(2))
    (track,) = backend.trained
    ids = [f"r0/p{group}/{number}" for group in range(4) for number in (0, 2)]
    assert list(track.sample_ids) == ids
    metrics = ran.steps[0].data["metrics"]
    assert metrics["reward/light/unscored"] == pytest.approx(1 / 3)
    expected = sum(sum(map(ord, sample)) for sample in ids) / 1000 / len(ids)
    # Sums of eight fp32 numbers near 0.5.
    assert metrics["reward_mean"] == metrics["reward/light"] == pytest.approx(expected, abs=1e-6)
    first = next(event for event in ran.events if event.kind == "evaluated").data["metrics"]
    assert first["share_at_threshold"] == 1.0 and "reward/light/unscored" not in first


@pytest.mark.parametrize("pieces", [0, 1])
@pytest.mark.parametrize("held_out", [0, 2])
def test_a_batch_without_any_score_ends_the_run(pieces: int, held_out: int) -> None:
    toy = plan(run={"max_steps": 1, "reward_overlap_groups": pieces})
    says = r"^reward\.light: none of the \d+ samples of track 'image' has a score\."
    with pytest.raises(RewardFailed, match=says):
        run(parts(backend=Counting(), rewards={"light": Silent()}), toy, held_out=prompts(held_out))


def test_samples_that_each_lack_one_of_two_scores_end_the_run() -> None:
    toy = dataclasses.replace(rewarded(a=choice("a", high=9.0), b=choice("b", high=9.0)), run=plan().run)

    class FirstSilent(Silent):
        number = "/0"

    made = parts(rewards={"a": FirstSilent(), "b": SecondSilent()})
    with pytest.raises(RewardFailed, match=r"^reward: none of the 8 samples .* has a score of every reward"):
        run(made, toy)


def test_scores_are_clipped_and_the_raw_ones_kept() -> None:
    track = score(make_track(), {"a": Given([-3.0, 0.5, 1.0, 7.0])}, {"a": 2.0}, {"a": choice(clip=[0.0, 1.0])})
    assert_equal(track.reward_parts["a"], [0.0, 0.5, 1.0, 1.0])
    assert_equal(track.reward_parts["a/original"], [-3.0, 0.5, 1.0, 7.0])
    assert_equal(track.rewards, [0.0, 1.0, 2.0, 2.0])


def test_a_sample_that_fails_the_gate_gets_the_lowest_score() -> None:
    """The lowest of its clip if it has one, else of its range; a threshold that fp32 misses by rounding is met."""
    scores = {"a": torch.tensor([2.0, -1.0, 0.5, 2.0]), "b": torch.tensor([1.0, 1.0, 0.2, 1 / 3 * 3 - 5e-7])}
    gated = {"gate": ("b", 1.0), "low": -2.0, "high": 2.0}
    assert_equal(counted_scores(scores, {"a": choice(**gated), "b": choice("b")})["a"], [2.0, -1.0, -2.0, 2.0])
    clipped = choice(clip=[-0.5, 1.0], **gated)
    assert_equal(counted_scores(scores, {"a": clipped, "b": choice("b")})["a"], [1.0, -0.5, -0.5, 1.0])


def test_gates_of_gates_must_pass_as_well_and_unknown_ones_leave_no_score() -> None:
    scores = {
        "a": torch.tensor([0.5, 0.5, 0.5, 0.5, NAN]),
        "b": torch.tensor([1.0, 1.0, 0.0, NAN, 0.0]),
        "c": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]),
    }
    choices = {"a": choice(gate=("b", 0.6)), "b": choice("b", gate=("c", 0.6)), "c": choice("c")}
    result = counted_scores(scores, choices)
    assert_equal(result["a"], [0.5, 0.0, 0.0, NAN, NAN])
    assert_equal(result["b"], [1.0, 0.0, 0.0, NAN, 0.0])


def test_the_weight_follows_its_schedule_and_stays_at_the_ends() -> None:
    config = RewardConfig(weight=0.5, schedule=[[10, 0.0], [20, 1.0], [40, 0.5]])
    expected = {0: 0.0, 10: 0.0, 15: 0.25, 20: 0.5, 30: 0.375, 40: 0.25, 1000: 0.25}
    assert {step: config.weight_at(step) for step in expected} == expected
    assert RewardConfig(weight=0.3).weight_at(7) == 0.3
    assert RewardConfig(weight=3.0, schedule=[[5, 2.0]]).weight_at(0) == 6.0


def test_a_step_weighs_rewards_alike_in_a_whole_run_and_in_a_resumed_one() -> None:
    config = RewardConfig(schedule=[[0, 1.0], [2, 0.0]])
    toy = plan()
    toy = dataclasses.replace(toy, rewards={"light": dataclasses.replace(toy.rewards["light"], config=config)})
    whole, resumed = ToyBackend(), ToyBackend()
    run(parts(backend=whole), dataclasses.replace(toy, run=dataclasses.replace(toy.run, max_steps=2)))
    resumed.weight, resumed.version = float(whole.trained[0].rewards.mean()), 1  # pyright: ignore[reportOptionalMemberAccess]
    run(parts(backend=resumed), dataclasses.replace(toy, run=dataclasses.replace(toy.run, max_steps=2)), start=1)
    assert [track.reward_weights for track in whole.trained] == [{"light": 1.0}, {"light": 0.5}]
    assert same(whole.trained[1], resumed.trained[0])


REFUSED = {
    "order of clip": ({"a": choice(clip=[1.0, 0.0])}, "reward.a.clip: got [1, 0], expected [low, high]"),
    "clip beyond": ({"a": choice(clip=[1.0, 2.0])}, "reward.a.clip: got [1, 2], expected [low, high]"),
    "unknown": ({"a": choice(gate=("bb", 1.0)), "b": choice("b")}, "reward.a.gate.reward: got 'bb'; the rewards are a"),
    "itself": ({"a": choice(gate=("a", 1.0))}, "reward.a.gate.reward: got a -> a, expected gates that end"),
    "cycle": (
        {"a": choice(gate=("b", 1.0)), "b": choice("b", gate=("a", 1.0))},
        "reward.b.gate.reward: got b -> a -> b, expected gates that end",
    ),
    "no threshold": ({"a": choice(gate=("b", None)), "b": choice("b")}, "reward.a.gate.at_least: got null, expected a"),
    "out of reach": ({"a": choice(gate=("b", 1.5)), "b": choice("b")}, "reward.a.gate.at_least: got 1.5, expected a"),
    "always": ({"a": choice(gate=("b", 0.0)), "b": choice("b")}, "reward.a.gate.at_least: got 0, expected a score"),
    "no gate": ({"a": choice(gate=("", 0.5))}, "reward.a.gate.at_least: got 0.5 of no reward"),
    "no lowest": (
        {"a": choice(gate=("b", 1.0), low=-math.inf), "b": choice("b")},
        "reward.a.clip: got null, expected [low, high]: a sample that fails the gate",
    ),
    "falling steps": ({"a": choice(schedule=[[5, 1.0], [5, 2.0]])}, "reward.a.schedule: got [[5, 1.0], [5, 2.0]], exp"),
    "one number": ({"a": choice(schedule=[[5]])}, "reward.a.schedule: got [[5]], expected [[step, factor], ...]"),
    "numbers": ({"a": choice(schedule=[5, 1])}, "reward.a.schedule: got [5, 1], expected [[step, factor], ...]"),
    "lists": ({"a": choice(schedule=[[[5], 1]])}, "reward.a.schedule: got [[[5], 1]], expected [[step, factor], ...]"),
    "words": ({"a": choice(schedule=[["x", 1]])}, "reward.a.schedule: got [['x', 1]], expected 0 to 1e+09"),
    "schedule of 0": (
        {"a": choice(weight=0.0, schedule=[[5, 1.0]]), "b": choice("b")},
        "reward.a.schedule: got [[5, 1.0]], factors of a weight of 0",
    ),
    "gap": (
        {"a": choice(schedule=[[0, 1.0], [1, 0.0]]), "b": choice("b", schedule=[[1, 0.0], [2, 1.0]])},
        "reward: every reward has weight 0 at step 1, so there is no training signal",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_sense_are_refused(case: str) -> None:
    choices, says = REFUSED[case]
    reasons = [str(reason) for reason in match(rewarded(**choices)).reasons if reason.key.startswith("reward")]
    assert any(reason.startswith(says) for reason in reasons), reasons


def test_settings_that_make_sense_and_steps_past_the_end_are_accepted() -> None:
    choices = {
        "a": choice(clip=[-1.0, 0.5], gate=("b", 0.5), schedule=[[0, 1.0], [3, 0.0]]),
        "b": choice("b", weight=0.0, gate=("c", 1.0)),
        "c": choice("c", weight=0.0),
    }
    assert [reason for reason in match(rewarded(**choices)).reasons if reason.key.startswith("reward")] == []


def test_a_gate_that_scores_another_stage_is_refused() -> None:
    toy = rewarded(a=choice(gate=("b", 1.0)), b=choice("b"))
    toy = dataclasses.replace(toy, stages=tuple(dataclasses.replace(stage, rewards=("a",)) for stage in toy.stages))
    reasons = [str(reason) for reason in match(toy).reasons]
    assert "reward.a.gate.reward: got 'b', which does not score stage 'image'." in reasons


def test_a_reserved_component_is_refused() -> None:
    own = choice()
    named = dataclasses.replace(own, spec=dataclasses.replace(own.spec, parts=("unscored",)))
    reasons = [str(reason) for reason in match(rewarded(a=named)).reasons]
    assert "reward.a: toy names a component 'unscored', which is reserved." in reasons


class MeanPixel(Given):
    """The mean of the pixels, times a factor."""

    def score(self, samples: ScoreInput) -> Scores:
        values = self.values[0] * samples.of("image", reward="mean").stacked.flatten(1).mean(dim=1)
        return Scores(values=values, scored=None if self.scored is None else torch.tensor(self.scored))


class Bytes(MeanPixel):
    """A mean that has no gradient, and raises for pixels that have one, as NumPy does."""

    def score(self, samples: ScoreInput) -> Scores:
        pixels = samples.of("image", reward="bytes").stacked
        return Scores(values=torch.from_numpy(pixels.numpy()).flatten(1).mean(dim=1))  # pyright: ignore[reportUnknownMemberType]


def test_clips_gates_and_the_weights_of_the_step_act_on_the_gradient() -> None:
    """Means 0.1, 0.4, 0.6, 0.9: the score is twice that, clipped at 1.5, and counts where the mean is at least 0.3."""
    media = torch.tensor([0.1, 0.4, 0.6, 0.9])[:, None, None, None].repeat(1, 3, 2, 2).requires_grad_()
    choices = {"a": choice(high=2.0, clip=[0.0, 1.5], gate=("b", 0.3)), "b": choice("b", weight=0.0)}
    score_of = MediaScore(
        rewards={"a": MeanPixel([2.0]), "b": Bytes([1.0])}, weights={"a": 1.0, "b": 0.0}, kind="image", choices=choices
    )
    track = dataclasses.replace(make_track(), reward_weights={"a": 0.25, "b": 0.0})
    values = score_of(track, media)
    # One rounding of fp32 each in the mean and the product.
    torch.testing.assert_close(values.detach(), torch.tensor([0.0, 0.2, 0.3, 0.375]), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(values.sum(), media)
    torch.testing.assert_close(gradient[:, 0, 0, 0], torch.tensor([0.0, 0.5 / 12, 0.5 / 12, 0.0]), rtol=1e-6, atol=0)


def test_a_loss_refuses_a_sample_that_has_no_score_any_more() -> None:
    score_of = MediaScore(rewards={"a": MeanPixel([1.0], [True, False])}, weights={"a": 1.0}, kind="image")
    with pytest.raises(RewardFailed, match=r"reward\.a: got a sample without a score in the loss"):
        score_of(make_track(2), torch.zeros(2, 3, 2, 2, requires_grad=True))
