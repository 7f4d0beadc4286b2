"""State of an algorithm: the loop advances it each step, a checkpoint keeps it, a resume restores it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from loop_toy import Ran, ToyAlgorithm, ToyBackend, ToyEngine, at, parts, plan, run
from unirl.core.errors import CheckpointError, RunFailed
from unirl.core.roles import Algorithm, ScoreInput, Scores
from unirl.core.specs.capability import Needs
from unirl.core.types.track import Track
from unirl.loop.algorithm_state import algorithm_state, end_algorithm_step, resume_algorithm
from unirl.loop.parts import Parts

FOLDER = Path("runs/one/checkpoints/step-000003")


class Counting(ToyAlgorithm):
    """Its state is the number of samples so far."""

    def __init__(self, *, keeps: bool = True, metric: str = "samples_so_far") -> None:
        self.keeps, self.metric = keeps, metric
        self.samples = 0.0
        self.given: list[Mapping[str, float]] = []

    def end_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self.given.append(metrics)
        self.samples += metrics["samples"]
        return {self.metric: self.samples}

    def state(self) -> Mapping[str, Any]:
        return {"samples": self.samples} if self.keeps else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"samples"}:
            raise ValueError(f"'samples' was expected; found {dict(state)}.")
        self.samples = state["samples"]


class Holding(Counting):
    """With a state of any kind."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def state(self) -> Mapping[str, Any]:
        return {"value": self.value}


def of(algorithm: Any) -> Algorithm:
    return cast("Algorithm", algorithm)


def with_algorithm(algorithm: Any, **others: Any) -> Parts:
    return parts(algorithm=algorithm, **others)


def test_the_loop_ends_each_step_with_what_it_logs_and_the_number_of_samples() -> None:
    algorithm = Counting()
    ran = run(with_algorithm(algorithm), plan(groups=4, samples=2, run={"max_steps": 3}))
    assert [event.data["metrics"]["samples_so_far"] for event in ran.steps] == [8.0, 16.0, 24.0]
    for event, given in zip(ran.steps, algorithm.given, strict=True):
        # It was given the logged metrics, except what the step moved, the number of samples and its own result.
        assert given["samples"] == 8.0
        assert {key: value for key, value in given.items() if key != "samples"} == {
            key: value
            for key, value in event.data["metrics"].items()
            if key != "samples_so_far" and not key.startswith("perf/")
        }


def test_algorithms_without_a_state_are_left_alone() -> None:
    assert algorithm_state(of(ToyAlgorithm())) == {}
    assert end_algorithm_step(of(ToyAlgorithm()), {"kl": 1.0}, samples=3) == {}
    resume_algorithm(of(ToyAlgorithm()), {}, folder=FOLDER)
    # Nor does one that needs none with these settings have anything in a checkpoint.
    assert algorithm_state(of(Counting(keeps=False))) == {}
    resume_algorithm(of(Counting(keeps=False)), {}, folder=FOLDER)


def test_a_state_goes_through_a_checkpoint_unchanged_and_is_a_copy() -> None:
    held: dict[str, Any] = {"a": [1, 0.1, None, True, "text"], "b": {"c": 1 / 3, "d": math.nan}}
    result = algorithm_state(of(Holding(held)))
    assert repr(result) == repr({"value": held})
    held["a"].append(2)
    assert len(result["value"]["a"]) == 5


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(1), "cannot be written to a checkpoint: Object of type Tensor is not JSON serializable"),
        ((1, 2), r"\['value'\] is \(1, 2\), and a checkpoint would give back \[1, 2\]"),
        ({1: "one"}, r"give back \{'1': 'one'\}"),
    ],
    ids=["tensor", "tuple", "number as key"],
)
def test_a_state_that_a_checkpoint_would_change_is_an_error(value: Any, says: str) -> None:
    with pytest.raises(RunFailed, match=rf"algorithm 'Holding': .*{says}"):
        algorithm_state(of(Holding(value)))


def test_a_name_that_the_step_has_already_is_an_error() -> None:
    with pytest.raises(RunFailed, match="gives the metric 'loss', which the step has already"):
        end_algorithm_step(of(Counting(metric="loss")), {"loss": 0.5}, samples=1)


def test_a_resume_without_the_state_on_either_side_is_refused() -> None:
    with pytest.raises(CheckpointError, match="step-000003: it has no state of the algorithm, and 'Counting' goes on"):
        resume_algorithm(of(Counting()), {}, folder=FOLDER)
    for algorithm in (ToyAlgorithm(), Counting(keeps=False)):
        with pytest.raises(CheckpointError, match=r"it has the state 'samples' of the algorithm, .* keeps none"):
            resume_algorithm(of(algorithm), {"samples": 3.0}, folder=FOLDER)
    with pytest.raises(CheckpointError, match="cannot go on from the state in it: 'samples' was expected; found"):
        resume_algorithm(of(Counting()), {"others": 1.0}, folder=FOLDER)


class Constant:
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=torch.ones(len(samples.group_ids)))

    def close(self) -> None: ...


def test_equal_rewards_are_trained_on_where_they_differ_from_those_of_earlier_steps() -> None:
    class AgainstEarlier(ToyAlgorithm):
        """The mean of the first step is 0, of the others 1."""

        mean = 0.0

        def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
            assert track.rewards is not None
            return dataclasses.replace(track, advantages=track.rewards - self.mean), {"mean": self.mean}

        def end_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
            self.mean = 1.0
            return {}

    made_of = with_algorithm(AgainstEarlier(), rewards={"light": Constant()})
    first, second = (event.data["metrics"] for event in run(made_of, plan(run={"max_steps": 2})).steps)
    assert (first["mean"], first["updates"]) == (0.0, 1) and "steps_skipped" not in first
    assert second["steps_skipped"] == 1.0 and "updates" not in second


def test_a_step_that_fails_in_training_is_not_saved_where_a_critic_may_have_trained() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    for needs, saved in ((Needs(), [1]), (Needs(critic=True), []), (Needs(fake_score=True), [])):
        toy, ran = plan(run={"max_steps": 3}), Ran()
        chosen = toy.only.algorithm
        assert chosen is not None
        spec = dataclasses.replace(chosen.spec, needs=needs)
        stage = dataclasses.replace(toy.only, algorithm=dataclasses.replace(chosen, spec=spec))
        toy = dataclasses.replace(toy, stages=(stage,))
        with pytest.raises(RunFailed, match="no memory"):
            run(parts(backend=ToyBackend(during=at(1, fail))), toy, into=ran)
        assert ran.saved == saved
        # In the rollout nothing has trained.
        ran = Ran()
        with pytest.raises(RunFailed, match="no memory"):
            run(parts(engine=ToyEngine(during=at(1, fail))), toy, into=ran)
        assert ran.saved == [1]


def test_a_step_that_fails_is_saved_with_the_state_before_it() -> None:
    """A step that took no update got to its end and fails then; what is saved must be the end of the step before it."""

    class FailsAtTheEnd(Counting):
        def end_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
            result = super().end_step(metrics)
            if len(self.given) == 2:
                raise RuntimeError("struck")
            return result

    toy = plan(run={"max_steps": 3})
    toy.only.advantage.constant_reward = "skip"
    algorithm, ran, backend = FailsAtTheEnd(), Ran(), ToyBackend()
    with pytest.raises(RunFailed, match=r"algorithm 'toy' .* struck"):
        run(with_algorithm(algorithm, rewards={"light": Constant()}, backend=backend), toy, into=ran)
    assert (backend.version, ran.saved, algorithm.samples) == (0, [1], 8.0)
