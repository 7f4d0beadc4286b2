"""DDPO's advantages against the running statistics of its formula, and its state across steps and runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import DdpoConfig, FlowGrpoConfig
from unirl.algorithms.flow_grpo.ddpo import Ddpo
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.loop.run import RunResult, train

ADVANTAGE = AdvantageConfig(eps=1e-6, clip=None)
STEP = {"samples": 8.0}


def make(*, advantage: AdvantageConfig = ADVANTAGE, **settings: Any) -> Ddpo:
    weights = {"one": 1.0}
    return Ddpo(DdpoConfig(**settings), advantage=advantage, reward_weights=weights, train=TrainConfig())


def make_track(prompts: list[str], rewards: list[float], *, step: int = 0) -> Track:
    rows = len(prompts)
    return Track(
        name="image",
        sample_ids=tuple(f"r{step}/{prompt}/{row}" for row, prompt in enumerate(prompts)),
        group_ids=tuple(f"r{step}/{prompt}" for prompt in prompts),
        inputs=Inputs.of_texts(prompts),
        metadata=({},) * rows,
        segment=LatentSegment(
            latents=torch.zeros(rows, 1, 2),
            positions=torch.zeros(rows, 1, dtype=torch.int64),
            sde_steps=torch.zeros(rows, 1, dtype=torch.int64),
            sigmas=torch.tensor([1.0, 0.0]),
            sampler=Sampler(kernel="flow-sde", eta=0.7),
        ),
        rewards=torch.tensor(rewards),
        reward_parts={"one": torch.tensor(rewards)},
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


def advantages(algorithm: Ddpo | FlowGrpo, track: Track) -> list[float]:
    result, _ = algorithm.advantages(track)
    assert result.advantages is not None
    return result.advantages.tolist()


class Tracker:
    """The statistics as the paper's appendix describes them: one bounded queue per prompt, this step's rewards first
    put into it."""

    def __init__(self, *, buffer_size: int, min_count: int) -> None:
        self.queues: dict[str, deque[float]] = {}
        self.size, self.min_count = buffer_size, min_count

    def __call__(self, prompts: list[str], rewards: list[float]) -> list[float]:
        result = np.zeros(len(prompts))
        for prompt in sorted(set(prompts)):
            rows = [row for row, other in enumerate(prompts) if other == prompt]
            queue = self.queues.setdefault(prompt, deque(maxlen=self.size))
            queue.extend(rewards[row] for row in rows)
            known = list(queue) if len(queue) >= self.min_count else rewards
            for row in rows:
                result[row] = (rewards[row] - np.mean(known)) / (np.std(known) + 1e-6)
        return result.tolist()


def test_advantages_are_those_of_running_statistics_of_each_prompt() -> None:
    rng = np.random.default_rng(0)
    algorithm, tracker = make(buffer_size=6, min_count=4), Tracker(buffer_size=6, min_count=4)
    few = 0.0
    for step in range(12):
        # Eight samples of some of five prompts, from one to six of each.
        prompts = sorted(str(name) for name in rng.choice(list("abcde"), size=8, p=[0.4, 0.3, 0.1, 0.1, 0.1]))
        prompts = [name for name in prompts if prompts.count(name) <= 6]
        rewards = [float(np.float32(value)) for value in rng.normal(size=len(prompts))]
        track, numbers = algorithm.advantages(make_track(prompts, rewards, step=step))
        few += numbers["groups_below_min_count"]
        assert track.advantages is not None
        # Computed in fp64, stored in fp32, of order 1.
        assert track.advantages.tolist() == pytest.approx(tracker(prompts, rewards), rel=1e-6, abs=1e-6)
        assert algorithm.end_step(STEP)["prompts_with_statistics"] == len(tracker.queues)
    assert 3 < few < 30, "both kinds of statistics are tried"
    assert algorithm.state()["rewards"] == {name: {"one": list(queue)} for name, queue in tracker.queues.items()}


@pytest.mark.parametrize("clip", [None, 0.5])
def test_samples_are_dropped_after_all_have_their_advantages(clip: float | None) -> None:
    """A prompt with fewer than `min_count` scores takes the statistics of the whole rollout, kept or not."""
    prompts, rewards = ["a"] * 4 + ["b"] * 2, [0.0, 1.0, 5.0, 2.0, 3.0, 9.0]
    known = {"a": rewards[:4], "b": rewards}
    expected = [
        (reward - np.mean(known[name])) / np.std(known[name]) for name, reward in zip(prompts, rewards, strict=True)
    ]
    settings = dataclasses.replace(ADVANTAGE, eps=0.0, clip=clip, keep_best=1, keep_worst=1)
    track, numbers = make(advantage=settings, min_count=3).advantages(make_track(prompts, rewards))
    kept = [0, 2, 4, 5]
    assert [int(name.split("/")[2]) for name in track.sample_ids] == kept
    assert (numbers["samples_kept"], numbers["groups_below_min_count"]) == (4, 1)
    assert track.advantages is not None
    bound = math.inf if clip is None else clip
    # Computed in fp64, stored in fp32.
    assert track.advantages.tolist() == pytest.approx(np.clip([expected[row] for row in kept], -bound, bound), rel=1e-6)


def test_without_earlier_steps_they_are_those_of_groups() -> None:
    prompts, rewards = ["a", "a", "b", "b", "b"], [0.0, 1.0, 0.5, 0.25, 2.0]
    settings = AdvantageConfig(scope="global", ddof=1)
    plain = FlowGrpo(FlowGrpoConfig(), advantage=settings, reward_weights={"one": 1.0}, train=TrainConfig())
    track = make_track(prompts, rewards)
    assert advantages(make(advantage=settings, min_count=1), track) == advantages(plain, track)


def test_a_group_larger_than_the_buffer_counts_whole() -> None:
    """So the order of the rows does not matter."""
    algorithm = make(buffer_size=2, min_count=2)
    rewards = [0.0, 1.0, 2.0, 5.0]
    for step in range(2):
        result = advantages(algorithm, make_track(["a"] * 4, rewards, step=step))
        expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)
        assert result == pytest.approx(expected.tolist(), rel=1e-6)
        algorithm.end_step(STEP)
    assert algorithm.state()["rewards"] == {"a": {"one": [2.0, 5.0]}}


def test_the_state_changes_at_the_end_of_a_step_alone_and_once() -> None:
    algorithm, track = make(min_count=1), make_track(["a", "a"], [0.0, 1.0])
    start = algorithm.state()
    assert start == {"rewards": {}}
    first = advantages(algorithm, track)
    assert advantages(algorithm, track) == first and algorithm.state() == start
    algorithm.end_step(STEP)
    kept = algorithm.state()
    assert start == {"rewards": {}} and kept == {"rewards": {"a": {"one": [0.0, 1.0]}}}
    # A step for which `advantages` was not called adds nothing.
    algorithm.end_step(STEP)
    assert algorithm.state() == kept


def test_samples_without_weight_leave_nothing_behind() -> None:
    algorithm = make(min_count=1)
    track = make_track(["a", "a", "a"], [0.0, 1.0, math.nan])
    track = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 1.0, 0.0]))
    # (0 - 1/2) / (1/2 + 1e-6)
    assert advantages(algorithm, track) == pytest.approx([-1.0, 1.0, 0.0], abs=3e-6)
    algorithm.end_step(STEP)
    assert algorithm.state()["rewards"] == {"a": {"one": [0.0, 1.0]}}


def test_a_resumed_algorithm_has_the_same_advantages() -> None:
    steps = [make_track(["a", "a", "b", "b"], [0.1 * step, 0.3, 0.7, 1.0 / (1 + step)], step=step) for step in range(4)]
    settings: dict[str, Any] = {"min_count": 3, "kl_coef": 0.1, "kl_target": 0.01}
    whole, first, second = make(**settings), make(**settings), make(**settings)
    expected: list[list[float]] = []
    for track in steps:
        expected.append(advantages(whole, track))
        whole.end_step({**STEP, "kl": 0.02})
    for track, values in zip(steps[:2], expected[:2], strict=True):
        assert advantages(first, track) == values
        first.end_step({**STEP, "kl": 0.02})
    second.load_state(json.loads(json.dumps(first.state())))
    for track, values in zip(steps[2:], expected[2:], strict=True):
        assert advantages(second, track) == values
        second.end_step({**STEP, "kl": 0.02})
    assert second.state() == whole.state()
    assert set(second.state()) == {"rewards", "kl_coef"}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"rewards": None},
        {"rewards": {"a": {"two": [1.0]}}},
        {"rewards": {"a": {"one": [1.0, "high"]}}},
        {"rewards": {"a": {"one": [math.nan]}}},
        {"rewards": {"a": [1.0]}},
        {"rewards": {}, "kl_coef": 0.1},
    ],
)
def test_a_state_that_it_cannot_have_given_is_refused_before_anything_changes(state: dict[str, Any]) -> None:
    algorithm = make(min_count=1)
    advantages(algorithm, make_track(["a", "a"], [0.0, 1.0]))
    algorithm.end_step(STEP)
    with pytest.raises(ValueError, match="expected"):
        algorithm.load_state(state)
    assert algorithm.state() == {"rewards": {"a": {"one": [0.0, 1.0]}}}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.min_count=17"], "algorithm.min_count: got 17, expected at most algorithm.buffer_size, 16"),
        (["advantage.center=global", "advantage.scope=global"], "advantage.center: got 'global', expected 'group'"),
        (["sampling.eta=0"], "sampling.eta: algorithm 'ddpo' takes ratios of log-probs"),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-ddpo", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)


def test_two_steps_and_two_after_a_resume_equal_four(tmp_path: Path) -> None:
    """On three prompts, which are the same in every step: from the second on, advantages come from earlier rewards."""
    catalog, prompts = Catalog.discover(), tmp_path / "prompts.jsonl"
    plan = compose("quickstart-ddpo", [], catalog=catalog)
    prompts.write_text("".join(Path(plan.data.train).read_text().splitlines(keepends=True)[:3]))
    words = [
        f"data.train={prompts}", "data.eval=''", "data.prompts_per_step=3", "data.samples_per_prompt=4",
        "sampling.num_inference_steps=4", "run.media_every=0", "run.max_steps=4", "~tracker.report",
        # Scores that no two images share.
        "+reward@reward.light=brightness", "algorithm.min_count=6",
    ]  # fmt: skip

    def run(name: str, *more: str, resume: Path | None = None) -> RunResult:
        overrides = [*words, *more, *([] if resume else [f"run.dir={tmp_path / name}"])]
        return train(
            compose("quickstart-ddpo", overrides, catalog=catalog), catalog=catalog, resume=resume, overrides=overrides
        )

    whole, first = run("whole"), run("parts", "run.stop_at=2")
    assert (first.status, first.step) == ("stopped", 2)
    second = run("parts", resume=first.folder)
    numbers = [metrics_of(folder) for folder in (whole.folder, second.folder)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4
    # Four samples of each prompt are too few, eight are not.
    assert [step["groups_below_min_count"] for step in numbers[0]] == [3.0, 0.0, 0.0, 0.0]
    assert {step["prompts_with_statistics"] for step in numbers[0]} == {3.0}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["kind"] == "step"]


def test_rewards_of_steps_are_refused() -> None:
    (reason,) = DdpoConfig(step_rewards=True).problems(None, None)
    assert (reason.key, reason.text) == (
        ".step_rewards",
        "got true, expected false: running statistics are of whole samples. Use algorithm=flow-grpo.",
    )
