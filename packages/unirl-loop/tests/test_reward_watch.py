"""A trained reward that rises while something else falls is reported, once for each pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from loop_toy import Ran, ToyBackend, ToyEngine, parts, plan, run
from test_scoring_and_costs import make_track
from unirl.core.errors import RunFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.loop.reward_watch import RewardWatch, shift

WEIGHTS = {"trained": 1.0, "seen": 0.0, "avoided": -1.0}


def test_the_shift_is_that_of_the_means_in_standard_deviations() -> None:
    """Halves 1, 2 and 4, 7 with spreads 1, 2, 2, 3: (5.5 - 1.5) / 2."""
    assert shift([(1.0, 1.0), (2.0, 2.0), (4.0, 2.0), (7.0, 3.0)]) == 2.0
    assert shift([(1.0, 0.0), (2.0, 0.0)]) == 0.0


def reported(slopes: Mapping[str, float], *, steps: int = 20, max_steps: int = 50) -> list[tuple[str, str]]:
    """Pairs of a series of steps in which parts move by their slope; in each step samples are the mean -1 and +1."""
    watch, pairs = RewardWatch(max_steps), list[tuple[str, str]]()
    for step in range(steps):
        values = {name: torch.tensor([-1.0, 1.0]) + slope * step for name, slope in slopes.items()}
        track = dataclasses.replace(make_track(2), reward_parts=values, reward_weights=WEIGHTS)
        pairs += [(rising, falling) for rising, falling, _ in watch.pairs(track)]
    return pairs


def test_a_window_of_twenty_steps_in_which_one_rises_and_another_falls_is_reported() -> None:
    """Halves of 10 steps with slope 0.06 are 0.6 apart, and 0.4 apart with slope 0.04; the spread is 1."""
    slopes = {"trained": 0.06, "trained/x": -0.06, "seen": -0.06}
    assert reported(slopes) == [("trained", "trained/x"), ("trained", "seen")]
    assert reported(slopes, steps=19) == []
    assert reported(slopes, max_steps=1000, steps=199) == []
    assert reported({**slopes, "trained": 0.04}) == []
    assert reported({"trained": 0.06, "seen": -0.04}) == []


@pytest.mark.parametrize("slopes", [{"seen": 0.1, "trained": -0.1}, {"trained": 0.1, "avoided": -0.1}])
def test_what_is_not_trained_may_rise_and_what_is_avoided_may_fall(slopes: dict[str, float]) -> None:
    assert reported(slopes) == []


class Trades:
    """Brightness, which rises as the toy trains; a component of it falls."""

    parts = ("dark",)

    def score(self, samples: ScoreInput) -> Scores:
        values = samples.of("image", reward="light").stacked[:, 0, 0, 0].clone()
        return Scores(values=values, parts={"dark": -values})

    def close(self) -> None: ...


def test_a_run_says_each_pair_once() -> None:
    """The toy adds the mean reward to its brightness: it doubles from step to step."""
    toy = plan(run={"max_steps": 24})
    ran = run(parts(engine=ToyEngine(), rewards={"light": Trades()}), toy)
    findings = [event for event in ran.events if event.kind == "finding"]
    (finding,) = [event for event in findings if "hacking" in event.data["text"]]
    # After nineteen steps, with the rollout of the twentieth.
    assert finding.step == 19
    assert "the trained reward 'light' rose by" in finding.data["text"] and "'light/dark' fell" in finding.data["text"]


def test_a_run_that_is_to_fail_stops_before_it_trains_on_and_is_saved() -> None:
    backend, ran = ToyBackend(), Ran()
    toy = plan(run={"max_steps": 24, "on_hacking": "fail"})
    with pytest.raises(RunFailed, match=r"the trained reward 'light' rose by .*'light/dark' fell .*reward hacking"):
        run(parts(engine=ToyEngine(), backend=backend, rewards={"light": Trades()}), toy, into=ran)
    # The twentieth is not trained on. In one before, all samples score alike in fp32: there is nothing to train on.
    assert len(backend.trained) == 18 and ran.saved == [19]


def collapsed(*steps: list[float], weight: float = 1.0) -> list[int]:
    """Steps, counted from 1, whose rollouts are reported, given the scores of each."""
    watch, said = RewardWatch(50), list[int]()
    for number, scores in enumerate(steps, start=1):
        parts = {"a": torch.tensor(scores), "a/x": torch.tensor(scores)}
        track = dataclasses.replace(make_track(len(scores)), reward_parts=parts, reward_weights={"a": weight})
        said += [number for name, _ in watch.collapses(track) if name == "a"]
    return said


GOOD, WORST = [0.0, 1.0], [0.0, 0.0]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([GOOD, *[WORST] * 5], [6]),
        ([*[GOOD] * 7, *[WORST] * 4, GOOD, *[WORST] * 3], []),
        ([*[WORST] * 9], []),
        # Lower than any of the first, though not alike.
        ([*[[0.5, 1.0]] * 5, *[[0.0, 0.9]] * 6], [10, 11]),
        ([*[[0.5, 1.0]] * 5, *[[0.5, 0.6]] * 6], []),
    ],
)
def test_five_steps_no_better_than_the_worst_of_the_first_samples_are_a_collapse(
    steps: list[list[float]], expected: list[int]
) -> None:
    assert collapsed(*steps) == expected
    assert collapsed(*steps, weight=-1.0) == collapsed(*steps, weight=0.0) == []


class Falls:
    """A reward of 0 or 1 by row for a step, and of 0 from then on."""

    parts = ()

    def __init__(self) -> None:
        self._calls = 0

    def score(self, samples: ScoreInput) -> Scores:
        self._calls += 1
        return Scores(values=torch.arange(samples.num_rows).remainder(2).float() * (self._calls == 1))

    def close(self) -> None: ...


def test_a_collapse_is_reported_once_or_fails_the_run() -> None:
    ran = run(parts(rewards={"light": Falls()}), plan(run={"max_steps": 9}))
    (finding,) = [event for event in ran.events if "collapsed" in event.data.get("text", "")]
    assert finding.step == 5 and "'light' was 0.1 in the first 5 steps, 0 for the worst" in finding.data["text"]
    with pytest.raises(RunFailed, match="the policy may have collapsed"):
        run(parts(rewards={"light": Falls()}), plan(run={"max_steps": 9, "on_collapse": "fail"}))
