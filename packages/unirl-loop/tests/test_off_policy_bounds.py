"""More than one rollout ahead: how far they get, with which weights, and what becomes of them when a run ends early."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_toy import Light, Ran, ToyBackend, ToyEngine, at, nothing, parts, passed, plan, prompts, run, threads
from unirl.core.errors import EchoMismatch, RunFailed
from unirl.core.specs.plan import Plan
from unirl.loop.parts import Parts


def ahead(number: int, *, steps: int = 5, **settings: Any) -> Plan:
    return plan(run={"max_staleness": number, "max_steps": steps, **settings})


def asked(engine: ToyEngine) -> list[tuple[int, int]]:
    """Step and version of each rollout that the engine was asked for, in their order."""
    return [(request.rollout, request.policy_version) for request in engine.requests]


def test_as_many_rollouts_as_asked_for_are_made_while_one_is_trained_on() -> None:
    scored, light = threading.Event(), Light()
    light.during = at(3, scored.set)
    # The first training ends when the three rollouts after it are scored; none of a fourth is asked for before.
    backend, engine = ToyBackend(during=at(0, lambda: passed(scored))), ToyEngine()
    assert run(parts(engine=engine, backend=backend, rewards={"light": light}), ahead(3)).result == (5, "done")
    assert asked(engine) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)]


def test_training_does_not_wait_for_an_engine_that_is_to_get_its_weights() -> None:
    training, backend, engine = threading.Event(), ToyBackend(), ToyEngine()
    # The third rollout is generated until the second training has begun; the fourth has the weights from before it.
    backend.during, engine.during = at(1, training.set), at(2, lambda: passed(training))
    assert run(parts(engine=engine, backend=backend), ahead(2)).result == (5, "done")
    assert asked(engine) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]
    assert [track.policy_version[0] for track in backend.trained] == [0, 0, 0, 1, 2]
    assert engine.overlaps == 0


def test_without_a_copy_of_the_weights_the_next_rollout_is_begun_when_the_engine_is_idle() -> None:
    generating, backend, engine = threading.Event(), ToyBackend(), ToyEngine()
    backend.during = at(0, lambda: passed(generating))
    slow = threading.Event()

    def generate(number: int) -> None:
        if number == 2:
            generating.set()
            slow.wait(timeout=0.1)  # long enough for weights to move under it, if nothing held them

    engine.during = generate
    assert run(synced(parts(engine=engine, backend=backend)), ahead(2)).result == (5, "done")
    assert engine.overlaps == 0
    assert [track.policy_version[0] for track in backend.trained] == [0, 0, 0, 1, 2]


def synced(made_of: Parts) -> Parts:
    """Parts whose weights travel as a launcher's do."""

    def sync(stage: Any) -> None:
        made_of.only.engine.load_weights(made_of.only.backend.export_weights(kind="full"))

    return dataclasses.replace(made_of, sync=sync)


def test_weights_that_did_not_change_are_not_copied() -> None:
    exported, backend = list[int](), ToyBackend()
    weights = backend.export_weights

    def counted(**asked_for: Any) -> Any:
        exported.append(backend.version)
        return weights(**asked_for)

    backend.export_weights = counted  # type: ignore[method-assign]
    assert run(parts(backend=backend), ahead(3, steps=6)).result == (6, "done")
    # Six rollouts: four with the first weights, two with those of after the first two steps.
    assert exported == [0, 1, 2]


def test_the_rollouts_that_wait_are_counted() -> None:
    light, scored = Light(), threading.Event()
    light.during = at(2, scored.set)
    backend = ToyBackend(during=at(0, lambda: passed_and(lambda: light.done == 3)))
    ran = run(parts(backend=backend, rewards={"light": light}), ahead(2))
    # The first step waits for its rollout; while it trained, two were made, and wait since then.
    waiting = [event.data["metrics"]["rollouts_waiting"] for event in ran.steps]
    assert waiting[:2] == [0, 2]
    assert all(0 <= number <= 2 for number in waiting)


def passed_and(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do, and for the little that it does after that."""
    tick = threading.Event()
    for _ in range(3000):
        if is_so():
            tick.wait(timeout=0.05)
            return
        tick.wait(timeout=0.01)
    raise AssertionError("the other thread did not get there")


def test_nothing_is_begun_beyond_the_end() -> None:
    engine = ToyEngine()
    assert run(parts(engine=engine), ahead(9, steps=2)).result == (2, "done")
    assert asked(engine) == [(0, 0), (1, 0)]
    engine = ToyEngine()
    assert run(parts(engine=engine), ahead(9, stop_at=3)).result == (3, "stopped")
    assert asked(engine) == [(0, 0), (1, 0), (2, 0)]


def test_an_evaluation_has_the_newest_weights_and_the_rollouts_after_it_their_own() -> None:
    backend, engine = ToyBackend(), ToyEngine()
    toy = ahead(3, steps=6)
    toy = dataclasses.replace(toy, eval=dataclasses.replace(toy.eval, every=2))
    ran = run(parts(engine=engine, backend=backend), toy, held_out=prompts(1))
    assert ran.result == (6, "done")
    assert [request.policy_version for request in engine.requests if request.num_rows == 1] == [0, 2, 4, 6]
    assert [track.policy_version[0] for track in backend.trained] == [0, 0, 0, 0, 1, 2]
    assert engine.overlaps == 0


def test_after_a_stop_steps_are_made_again_with_the_newest_weights() -> None:
    stop, backend, engine = threading.Event(), ToyBackend(), ToyEngine()
    backend.during = at(1, stop.set)
    ran = run(parts(engine=engine, backend=backend), ahead(2, steps=7), should_stop=stop.is_set)
    assert (ran.result, ran.saved) == ((2, "stopped"), [2])
    assert not threads("rollout")
    again = ToyEngine()
    resumed = run(parts(engine=again, backend=backend), ahead(2, steps=7), start=2)
    assert asked(again) == [(2, 2), (3, 2), (4, 2), (5, 3), (6, 4)]
    assert [event.data["metrics"]["staleness_max"] for event in resumed.steps] == [0, 1, 2, 2, 2]


def test_training_that_fails_leaves_nothing_in_the_making() -> None:
    generating, failed = threading.Event(), threading.Event()

    def generate() -> None:
        generating.set()
        passed(failed)

    def fail() -> None:
        passed(generating)
        failed.set()
        raise OSError("out of memory")

    engine, backend, light = ToyEngine(during=at(1, generate)), ToyBackend(during=at(0, fail)), Light()
    made_of = parts(engine=engine, backend=backend, rewards={"light": light})
    with pytest.raises(RunFailed, match=r"backend 'plain' .* failed in phase 'train': OSError: out of memory"):
        run(made_of, ahead(3))
    # The rollout being generated ended with its current call; those after it were never made.
    assert [step for step, _ in asked(engine)] == [0, 1]
    assert light.calls == 1
    assert not threads("rollout")


def test_a_rollout_that_fails_is_that_of_its_step_and_the_last_one_made() -> None:
    def fail() -> None:
        raise OSError("the engine's process is gone")

    ran, engine = Ran(), ToyEngine(during=at(2, fail))
    with pytest.raises(RunFailed, match="engine 'own' failed in phase 'generate': OSError"):
        run(parts(engine=engine), ahead(3), into=ran)
    assert [event.step for event in ran.steps] == [1, 2]
    assert ran.saved == [2]
    assert [step for step, _ in asked(engine)] == [0, 1, 2]
    assert not threads("rollout")


def test_weights_that_arrive_otherwise_than_sent_fail_the_step_that_they_are_for() -> None:
    training, backend = threading.Event(), ToyBackend()
    backend.during = at(1, training.set)

    class Rounding(ToyEngine):
        def load_weights(self, update: Any) -> Any:
            if update.version:
                update = dataclasses.replace(update, tensors={"weight": torch.tensor(0.5)})
            return super().load_weights(update)

    engine, ran = Rounding(during=at(2, lambda: passed(training))), Ran()
    with pytest.raises(EchoMismatch, match=r"version 1 with checksum .* was sent; engine 'own' holds"):
        run(parts(engine=engine, backend=backend), ahead(2), into=ran)
    assert [event.step for event in ran.steps] == [1, 2, 3]


def test_the_same_weights_bring_the_same_numbers_however_fast_the_engine_is() -> None:
    def mean_rewards(during: Callable[[int], None]) -> list[float]:
        ran = run(parts(engine=ToyEngine(during=during)), ahead(3, steps=8))
        return [event.data["metrics"]["reward_mean"] for event in ran.steps]

    def slow(number: int) -> None:
        threading.Event().wait(timeout=0.02 * (number % 3))

    assert mean_rewards(slow) == mean_rewards(nothing)
