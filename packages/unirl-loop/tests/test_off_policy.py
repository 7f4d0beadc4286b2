"""Rollouts ahead: the next one is made while this one is trained on, with the weights from before that training."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from loop_toy import LIMIT_S, Light, Ran, ToyBackend, ToyEngine, at, met, parts, passed, plan, prompts, run, threads
from unirl.core.errors import RewardFailed, RunFailed
from unirl.core.specs.plan import Plan

AHEAD = {"max_staleness": 1}


def one_after_the_other(toy: Plan) -> tuple[float, list[float]]:
    """The schedule of a run ahead, without threads: weights at its end, and the mean reward of each step.

    A sample's reward is its own brightness plus the weight that made it, and training adds the mean reward. Step s has
    samples of the weights after max(0, s - `max_staleness`) steps.
    """
    after, rewards = [0.0], list[float]()
    for step in range(toy.run.max_steps):
        ids = [f"r{step}/p{n % 6}/{k}" for n in range(step * 4, step * 4 + 4) for k in range(2)]
        held = after[max(0, step - toy.run.max_staleness)]
        rewards.append(sum(sum(map(ord, name)) / 1000 + held for name in ids) / len(ids))
        after.append(after[-1] + rewards[-1])
    return after[-1], rewards


def test_the_next_rollout_is_generated_while_this_one_is_trained_on() -> None:
    both = threading.Barrier(2)
    # The first training and the second generation meet: neither could end before the other has begun.
    backend, engine = ToyBackend(during=at(0, lambda: met(both))), ToyEngine(during=at(1, lambda: met(both)))
    ran = run(parts(engine=engine, backend=backend), plan(run=AHEAD))
    assert ran.result == (3, "done")


def test_scores_are_ready_before_training_ends_as_well() -> None:
    scored = threading.Event()
    backend, light = ToyBackend(during=at(0, lambda: passed(scored))), Light(during=at(1, scored.set))
    assert run(parts(backend=backend, rewards={"light": light}), plan(run=AHEAD)).result == (3, "done")


@pytest.mark.parametrize("reward_overlap_groups", [0, 2])
@pytest.mark.parametrize("ahead", [1, 2, 3, 9])
def test_a_run_ahead_gives_the_numbers_of_its_schedule_done_one_after_the_other(
    ahead: int, reward_overlap_groups: int
) -> None:
    toy = plan(run={"max_staleness": ahead, "max_steps": 6, "reward_overlap_groups": reward_overlap_groups})
    backend = ToyBackend()
    ran = run(parts(backend=backend), toy)
    weight, rewards = one_after_the_other(toy)
    # The toy's weight travels as fp32, so sums of some ten of order 10 are off by a few 1e-6.
    assert backend.weight == pytest.approx(weight, abs=1e-4)
    assert [event.data["metrics"]["reward_mean"] for event in ran.steps] == pytest.approx(rewards, abs=1e-4)


@pytest.mark.parametrize("ahead", [1, 2, 3, 9])
def test_samples_carry_their_version_and_staleness_is_measured_from_it(ahead: int) -> None:
    backend, engine = ToyBackend(jump=2), ToyEngine()
    ran = run(parts(engine=engine, backend=backend), plan(run={"max_staleness": ahead, "max_steps": 6}, updates=2))
    made_with = [2 * max(0, step - ahead) for step in range(6)]
    assert [track.policy_version[0] for track in backend.trained] == made_with
    ages = [2 * step - version for step, version in enumerate(made_with)]
    assert [event.data["metrics"]["staleness_max"] for event in ran.steps] == ages
    assert [event.data["metrics"]["staleness_mean"] for event in ran.steps] == ages


def test_a_sample_that_is_too_old_stops_the_run() -> None:
    # 3 optimizer steps where the plan says 1: the sample of step 1 is 3 versions behind.
    with pytest.raises(
        RunFailed, match=r"'r1/p4/0' was made with version 0 of the weights, and version 3 trains; .*may be 1"
    ):
        run(parts(backend=ToyBackend(jump=3)), plan(run=AHEAD))


def test_without_it_every_rollout_has_the_newest_weights_and_says_nothing_of_age() -> None:
    backend = ToyBackend()
    ran = run(parts(backend=backend), plan())
    assert [track.policy_version[0] for track in backend.trained] == [0, 1, 2]
    new = {"overlap", "staleness_max", "generate_s", "reward_queue_max"}
    assert not any(new & set(event.data["metrics"]) for event in ran.steps)


def test_what_is_done_at_once_is_measured() -> None:
    ran = run(parts(), plan(run={**AHEAD, "reward_overlap_groups": 1}))
    for event in ran.steps:
        result = event.data["metrics"]
        longest = max(result[f"{phase}_s"] for phase in ("generate", "score", "train"))
        assert longest > 0
        assert result["overlap"] * longest >= sum(event.data["phases"].values())
        assert result["generate_utilisation"] * result["overlap"] * longest == pytest.approx(result["generate_s"])
        assert 0 < result["reward_latency_mean_s"] <= result["reward_latency_max_s"]
        assert 1 <= result["reward_queue_max"] <= 4
        # The seconds of the thread that trains: what was made elsewhere shows as the wait for it.
        assert set(event.data["phases"]) <= {"sync", "request", "wait", "advantages", "train"}


def test_weights_never_move_under_a_generation() -> None:
    moved, engine, held_out = threading.Event(), ToyEngine(), prompts(1)

    def generate(number: int) -> None:
        # Long enough for training to end at its side, and for the sync after it to come, if nothing held it.
        moved.wait(timeout=0.1)

    engine.during = generate
    toy = dataclasses.replace(plan(run={**AHEAD, "max_steps": 4}), eval=dataclasses.replace(plan().eval, every=1))
    ran = run(parts(engine=engine), toy, held_out=held_out)
    assert engine.overlaps == 0
    # Evaluations ask for the newest weights, rollouts for those of before the training at their side.
    asked = [(request.rollout, request.num_rows == 1, request.policy_version) for request in engine.requests]
    evaluated = [version for _, is_evaluation, version in asked if is_evaluation]
    assert evaluated == [0, 1, 2, 3, 4]
    assert [(r, v) for r, is_evaluation, v in asked if not is_evaluation] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert ran.result == (4, "done")


def test_a_failure_of_the_engine_in_the_background_is_that_of_the_next_step() -> None:
    def fail() -> None:
        raise OSError("the engine's process is gone")

    ran = Ran()
    with pytest.raises(RunFailed, match="engine 'own' failed in phase 'generate': OSError"):
        run(parts(engine=ToyEngine(during=at(2, fail))), plan(run=AHEAD), into=ran)
    # Steps 1 and 2 were trained, and the checkpoint says so.
    assert [event.step for event in ran.steps] == [1, 2]
    assert ran.saved == [2]
    assert not threads("rollout")


def test_a_failure_of_a_reward_in_the_background_is_named() -> None:
    def fail() -> None:
        raise ValueError("no face in the picture")

    with pytest.raises(RewardFailed, match=r"reward\.light: raised ValueError: no face"):
        run(parts(rewards={"light": Light(during=at(1, fail))}), plan(run=AHEAD))


def test_training_that_fails_ends_the_rollout_at_its_side() -> None:
    generating, failed = threading.Event(), threading.Event()

    def generate() -> None:
        generating.set()
        passed(failed)

    def fail() -> None:
        passed(generating)
        failed.set()
        raise OSError("out of memory")

    engine, backend = ToyEngine(during=at(1, generate)), ToyBackend(during=at(0, fail))
    with pytest.raises(RunFailed, match=r"backend 'plain' .* failed in phase 'train': OSError: out of memory"):
        run(parts(engine=engine, backend=backend), plan(run=AHEAD))
    assert not threads("rollout")


def test_a_stop_throws_the_rollout_away_and_the_next_run_makes_it_with_the_newest_weights() -> None:
    stop, backend, engine = threading.Event(), ToyBackend(), ToyEngine()
    backend.during = at(1, stop.set)
    ran = run(parts(engine=engine, backend=backend), plan(run={**AHEAD, "max_steps": 5}), should_stop=stop.is_set)
    assert ran.result == (2, "stopped")
    assert ran.saved == [2]
    assert not threads("rollout")
    again = ToyEngine()
    resumed = run(parts(engine=again, backend=backend), plan(run={**AHEAD, "max_steps": 5}), start=2)
    assert [(request.rollout, request.policy_version) for request in again.requests] == [(2, 2), (3, 2), (4, 3)]
    assert [event.data["metrics"]["staleness_max"] for event in resumed.steps] == [0, 1, 1]


def test_nothing_is_begun_that_no_step_will_take() -> None:
    engine = ToyEngine()
    assert run(parts(engine=engine), plan(run={**AHEAD, "max_steps": 5, "stop_at": 2})).result == (2, "stopped")
    assert [request.rollout for request in engine.requests] == [0, 1]


def test_a_second_ctrl_c_does_not_wait_for_the_engine() -> None:
    generating, release = threading.Event(), threading.Event()

    def generate() -> None:
        generating.set()
        passed(release)

    def interrupt() -> None:
        passed(generating)
        raise KeyboardInterrupt

    light = Light()
    engine, backend = ToyEngine(during=at(1, generate)), ToyBackend(during=at(0, interrupt))
    with pytest.raises(KeyboardInterrupt):
        run(parts(engine=engine, backend=backend, rewards={"light": light}), plan(run=AHEAD))
    assert engine.is_generating
    release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]:
        thread.join(timeout=LIMIT_S)
    # It ended with the call that it was in: what came of that was not scored.
    assert light.calls == 1
    assert not threads("rollout")
