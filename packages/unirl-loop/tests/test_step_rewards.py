"""Rewards of single SDE steps: the samples that are drawn for them, what each step gained, and samples without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loop_toy import PARTS, Light, ToyBackend, ToyEngine, ToyModel, parts, plan, prompts, run
from plans import changed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.capability import Needs
from unirl.core.specs.config import ScoutsConfig
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.plan import Plan
from unirl.core.specs.spec import AlgorithmSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.loop.announce import predicted_costs
from unirl.loop.parts import Parts
from unirl.loop.step_rewards import step_reward_metrics

NONE = float("nan")
SCORES = {"p0/0": (1, 4, 5), "p0/1": (2, 2, 0), "p1/0": (0, 8, 7), "p1/1": (6, 3, 9)}
"""Sample -> rewards expected before SDE steps 1 and 3, and its own."""
GAINS = [[3, 1], [0, -2], [8, -1], [-3, 6]]


class Scheduled(ToyModel):
    """As many denoise steps as are asked for."""

    def schedule(self, sampling: LatentSamplingConfig) -> torch.Tensor:
        return torch.linspace(1, 0, sampling.num_inference_steps + 1)


class Echoing(ToyEngine):
    """Echoes the keys of its noise."""

    def _track(self, request: Request) -> Track:
        track = super()._track(request)
        segment = dataclasses.replace(track.latent, step_noise_ids=request.latent.step_noise_ids)
        return dataclasses.replace(track, segment=segment)


class ByName(Light):
    """Scores of `SCORES`, in other units; a sample named in `lacking` has none."""

    parts = ()

    def __init__(self, *lacking: str, factor: float = 1.0) -> None:
        self.lacking, self.factor = lacking, factor

    def score(self, samples: ScoreInput) -> Scores:
        values = [self.factor * self._of(sample.removeprefix("r0/")) for sample in samples.sample_ids]
        scored = [sample.removeprefix("r0/") not in self.lacking for sample in samples.sample_ids]
        return Scores(values=torch.tensor(values), scored=torch.tensor(scored))

    def _of(self, name: str) -> float:
        sample, _, step = name.partition("/before-")
        return float(SCORES[sample][{"1": 0, "3": 1, "": 2}[step]])


def toy(*, scouts: int = 0, **changes: Any) -> Plan:
    """2 prompts, 2 samples of each in 5 steps, of which 1 and 3 have noise."""
    base = plan(groups=2, samples=2, run={"max_steps": 1})
    needs = Needs(trajectory="window", log_probs="gaussian", step_rewards=True)
    algorithm = dataclasses.replace(base.only.parts["algorithm"], spec=AlgorithmSpec(name="toy", needs=needs, **PARTS))
    sampling = LatentSamplingConfig(num_inference_steps=5, sde=SdeStepsConfig(mode="fixed", steps=[1, 3]))
    given = ScoutsConfig(samples_per_prompt=scouts, num_inference_steps=4 if scouts else 0)
    data = dataclasses.replace(base.data, scouts=given)
    return changed(base, **{"algorithm": algorithm, "sampling": sampling, "data": data, **changes})


def scored(**given: Any) -> Parts:
    return dataclasses.replace(parts(**given), models={"": Scheduled()})


def trained(reward: Light, **changes: Any) -> tuple[Track, dict[str, Any], Echoing]:
    """The track that was trained on, the metrics of the step, and the engine."""
    engine, backend = Echoing(), ToyBackend()
    (step,) = run(scored(engine=engine, backend=backend, rewards={"light": reward}), toy(**changes)).steps
    (track,) = backend.trained
    return track, step.data["metrics"], engine


def test_the_noise_of_a_sample_ends_before_each_of_its_sde_steps() -> None:
    _, _, engine = trained(ByName())
    expected, samples = engine.requests
    assert samples.sample_ids == tuple(f"r0/{name}" for name in SCORES)
    assert expected.sample_ids == tuple(f"r0/{name}/before-{step}" for name in SCORES for step in (1, 3))
    assert expected.latent.sde_steps.tolist() == [[-1, -1], [1, -1]] * 4
    assert expected.latent.scored_steps.shape == (8, 0), "no log-probs and no trajectory"
    assert expected.latent.noise_ids == tuple(name for name in samples.sample_ids for _ in range(2))
    assert expected.latent.step_noise_ids == tuple((name,) * 5 for name in samples.sample_ids for _ in range(2))
    assert expected.group_ids == tuple(f"r0/p{number}" for number in range(2) for _ in range(4))
    for field in ("seed", "rollout", "policy_version"):
        assert getattr(expected, field) == getattr(samples, field)


def test_a_step_has_the_reward_that_it_gained() -> None:
    track, metrics, _ = trained(ByName())
    assert track.latent.step_rewards["light"].tolist() == GAINS
    assert track.rewards is not None and track.rewards.tolist() == [5, 0, 7, 9], "its own rewards stay"
    total = track.latent.step_rewards["light"].sum(dim=1).tolist()
    assert total == [own - before for before, _, own in SCORES.values()], "together they are what noise gained"
    assert metrics["reward_mean"] == 21 / 4, "over the samples that train"
    raised = {name: value for name, value in metrics.items() if name.startswith("step_reward/")}
    assert raised == {"step_reward/1/raised": 2 / 4, "step_reward/3/raised": 2 / 4}


@pytest.mark.parametrize("lacks", ["p1/0", "p1/0/before-1", "p1/0/before-3"])
def test_a_sample_without_one_of_its_scores_counts_nowhere(lacks: str) -> None:
    track, metrics, _ = trained(ByName(lacks))
    assert track.sample_weights.tolist() == [1, 1, 0, 1]
    assert metrics["step_reward/1/raised"] == pytest.approx(1 / 3)
    assert metrics["step_reward/3/raised"] == pytest.approx(2 / 3)


def test_scouts_choose_the_samples_whose_steps_get_rewards() -> None:
    class Chosen(ByName):
        """The first and the last of three scouts are the worst and the best."""

        def _of(self, name: str) -> float:
            number = int(name.split("/")[1])
            return float(number) if "/before-" not in name else 0.0

    track, _, engine = trained(Chosen(), scouts=3)
    assert [request.num_rows for request in engine.requests] == [6, 8, 4]
    assert track.sample_ids == ("r0/p0/0", "r0/p0/2", "r0/p1/0", "r0/p1/2")
    assert track.latent.step_rewards["light"].tolist() == [[0, 0], [0, 2]] * 2


def test_rewards_of_weight_0_score_the_samples_that_train_alone() -> None:
    class Watching(ByName):
        seen: tuple[str, ...] = ()

        def score(self, samples: ScoreInput) -> Scores:
            self.seen += samples.sample_ids
            return super().score(samples)

    watched, base, backend = Watching(), toy(), ToyBackend()
    watches = dataclasses.replace(base.rewards["light"], config=RewardConfig(weight=0.0))
    seen = dataclasses.replace(base, rewards={**base.rewards, "seen": watches})
    seen = seen.with_stages(lambda stage: dataclasses.replace(stage, rewards=("light", "seen")))
    (step,) = run(scored(backend=backend, rewards={"light": ByName(), "seen": watched}, engine=Echoing()), seen).steps
    assert watched.seen == tuple(f"r0/{name}" for name in SCORES)
    (track,) = backend.trained
    assert track.latent.step_rewards.keys() == {"light"} and track.latent.step_rewards["light"].tolist() == GAINS
    assert step.data["metrics"]["reward/seen"] == 21 / 4


def test_pieces_of_a_rollout_give_the_same() -> None:
    whole, _, _ = trained(ByName())
    base = toy()
    run_of = dataclasses.replace(base.run, reward_overlap_groups=1)
    pieces, _, _ = trained(ByName(), run=run_of)
    assert torch.equal(pieces.latent.step_rewards["light"], whole.latent.step_rewards["light"])


def test_what_each_reward_gained_is_kept_apart_and_weighed_together() -> None:
    segment = LatentSegment(
        latents=torch.zeros(3, 1, 1),
        positions=torch.full((3, 1), 2),
        sde_steps=torch.tensor([[0, 1], [0, 1], [0, -1]]),
        train_steps=torch.zeros((3, 0), dtype=torch.int64),
        step_rewards={
            "one": torch.tensor([[1.0, 1.0], [-2.0, 2.0], [1.0, NONE]]),
            "two": torch.tensor([[-1.0, 1.0], [9.0, -9.0], [1.0, NONE]]),
            "seen": torch.full((3, 2), NONE),
        },
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    track = Track(
        name="image",
        sample_ids=("a", "b", "c"),
        group_ids=("g",) * 3,
        inputs=Inputs.of_texts(["a"] * 3),
        metadata=({},) * 3,
        segment=segment,
        reward_weights={"one": 1.0, "two": 0.5, "seen": 0.0},
        sample_weights=torch.tensor([1.0, 1.0, 1.0]),
        status=(Status.COMPLETED,) * 3,
        policy_version=(0,) * 3,
    )
    # Sums of step 0: 1 - 0.5, -2 + 4.5, 1 + 0.5; of step 1: 1 + 0.5, 2 - 4.5.
    assert step_reward_metrics(track) == {"step_reward/0/raised": 1.0, "step_reward/1/raised": 0.5}


def test_the_cost_of_a_step_counts_them() -> None:
    """Rows of the rollout: 4 samples of 5 steps, and 8 more."""
    cost = predicted_costs(toy(), scored(), prompts(2), None)["image"]
    assert cost["rollout_rows"] == (4 + 8) * 5
    assert cost["train_rows"] == 4 * 2
