"""Rollouts ahead of training in plans of several stages: the numbers are those of the schedule on one thread."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
import torch
from own_weights import with_own_weights
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.match.match import match
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Job
from unirl.core.specs.plan import Plan
from unirl.core.types.track import Track
from unirl.loop.build import build_parts
from unirl.loop.credit import credited
from unirl.loop.generation import generate_stages
from unirl.loop.parts import attributed, sync_weights
from unirl.loop.requests import step_requests
from unirl.loop.scoring import score
from writer_and_painter import JOINT, RECIPE, Weights, composed, numbers, saved_weights, weights

AHEAD = (
    "run.max_staleness=1",
    "train.old_log_probs=engine",
    "run.max_steps=3",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)
APART = ("launcher=ray", "launcher.placement=separate", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def apart(plan: Plan) -> Plan:
    """The plan with separate weights for the engines of models that train."""
    return plan.with_stages(
        lambda stage: (
            stage if stage.backend is None else dataclasses.replace(stage, engine=with_own_weights(stage.engine))
        )
    )


def one_after_the_other(plan: Plan) -> tuple[list[dict[str, float]], Weights]:
    """The schedule of a run ahead, on one thread: the mean reward of each stage in each step, and the last weights."""
    parts = build_parts(plan, catalog=Catalog.discover())
    prompts = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    rollouts: list[dict[str, Track]] = []
    means: list[dict[str, float]] = []

    def generated(step: int) -> dict[str, Track]:
        sync_weights(parts, plan)
        return generate_stages(
            parts,
            plan,
            step_requests(parts, plan, [prompts[row] for row in order.step(step)], step=step),
            versions={stage.name: parts.version(stage) for stage in plan.stages},
            during=lambda stage: attributed(stage.name, phase="generate"),
        )

    for step in range(plan.run.max_steps):
        while len(rollouts) < min(step + 1 + plan.run.max_staleness, plan.run.max_steps):
            rollouts.append(generated(len(rollouts)))
        scored = {
            stage.name: score(
                rollouts[step][stage.name],
                {key: parts.rewards[key] for key in stage.rewards},
                parts.reward_weights,
            )
            for stage in plan.stages
        }
        tracks = credited(scored, plan.stages)
        means.append({name: float(track.rewards.mean()) for name, track in tracks.items() if track.rewards is not None})
        for learner, backend in parts.backends.items():
            jobs: list[Job] = []
            for stage in (stage for stage in plan.trained if stage.learner.name == learner):
                algorithm = parts.algorithms[stage.name]
                track, _ = algorithm.advantages(tracks[stage.name])
                settings = train_settings(stage) if len(plan.trained) > 1 else None
                jobs.append(Job(track=track, algorithm=algorithm, name=stage.name, train=settings))
            backend.train(jobs, progress=step / (plan.run.max_steps - 1))
            backend.end_rollout()
    return means, weights(parts)


def assert_equal_bit_for_bit(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for learner, tensors in left.items():
        assert tensors.keys() == right[learner].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, right[learner][name]), f"{name} of {learner} differs"


@pytest.mark.parametrize("words", [(), JOINT], ids=["frozen painter", "both train"])
@pytest.mark.parametrize(("ahead", "ages"), [(1, [0, 1, 1]), (2, [0, 1, 2])])
def test_a_run_ahead_gives_the_numbers_of_its_schedule_on_one_thread(
    recipe: Path, tmp_path: Path, words: tuple[str, ...], ahead: int, ages: list[int]
) -> None:
    folder = tmp_path / "run"
    plan = apart(composed(recipe, *words, *AHEAD, f"run.max_staleness={ahead}", f"run.dir={folder}"))
    steps = numbers(plan)
    means, expected = one_after_the_other(plan)
    assert [{name: step[f"{name}/reward_mean"] for name in means[0]} for step in steps.values()] == means
    assert_equal_bit_for_bit(saved_weights(plan, folder, step=3), expected)
    # One update a step. A frozen model has one version.
    for stage in plan.stages:
        expected_ages = [0] * len(ages) if stage.backend is None else ages
        assert [step[f"{stage.name}/staleness_max"] for step in steps.values()] == expected_ages


def test_a_stage_that_does_not_train_samples_weights_that_do(recipe: Path) -> None:
    """A second text stage has no algorithm; its engine shares the module that the first one trains."""
    again = (
        "+engine@engine.again=trainside",
        "+sampling@sampling.again=text",
    )
    stages = "stages:\n  again: {model: writer, parent: rewrite}\n"
    recipe.write_text(RECIPE.replace("stages:\n", stages), encoding="utf-8")
    plan = composed(recipe, *again, *AHEAD)
    first = plan.stage("rewrite")
    own = dataclasses.replace(first, engine=with_own_weights(first.engine))
    plan = plan.with_stages(lambda stage: own if stage.name == "rewrite" else stage)
    reasons = [str(reason) for reason in match(plan).reasons]
    assert any("engine 'trainside' shares its weights with training" in reason for reason in reasons), reasons


@pytest.mark.slow
def test_workers_of_their_own_give_the_numbers_of_one_process(recipe: Path, tmp_path: Path) -> None:
    words = (*JOINT, *AHEAD, "run.reward_overlap_groups=1")
    here, there = tmp_path / "here", tmp_path / "there"
    expected = numbers(apart(composed(recipe, *words, f"run.dir={here}")))
    plan = composed(recipe, *words, *APART, f"run.dir={there}")
    with ray_clusters.joined():
        steps = numbers(plan)
    left, right = saved_weights(plan, there, step=3), saved_weights(plan, here, step=3)
    for learner, tensors in right.items():
        for name, tensor in tensors.items():
            # The same arithmetic in fp32, in processes whose libraries may choose other kernels.
            torch.testing.assert_close(left[learner][name], tensor, rtol=0, atol=1e-6)
    for step, one in expected.items():
        other: dict[str, Any] = steps[step]
        for name in ("rewrite", "image"):
            # Scores are means over pixels in fp32.
            assert other[f"{name}/reward_mean"] == pytest.approx(one[f"{name}/reward_mean"], abs=1e-6)
            assert other[f"{name}/staleness_max"] == one[f"{name}/staleness_max"]
