"""Signals: which let a step finish, which interrupt it, and what is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from loop_toy import Light, Ran, ToyBackend, ToyEngine, at, parts, plan, run
from unirl.core.errors import RunFailed
from unirl.core.types.data import Prompt
from unirl.loop.stop import Preempted, Stop, stop_on_signal

HELD_OUT = [Prompt(prompt_id="x", text="x", metadata={})]


def sent(*numbers: signal.Signals) -> Callable[[], None]:
    """Sends signals to this process, and waits until the last one is handled, in the main thread."""

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            # Handlers run between instructions of the main thread, which is this one.
            for _ in range(1000):
                pass

    return send


def stopped(toy: Any, **made_of: Any) -> tuple[Ran, ToyBackend]:
    """A run that its parts stop by a signal; it was started at step 2, whose checkpoint is there."""
    backend = made_of.pop("backend", None) or ToyBackend()
    held_out = made_of.pop("held_out", ())
    with stop_on_signal() as stop:
        ran = run(
            parts(backend=backend, **made_of),
            toy,
            start=2,
            held_out=held_out,
            should_stop=lambda: stop.is_set,
            interrupting=stop.interrupting,
        )
    return ran, backend


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("where", ["engine", "reward"])
def test_an_urgent_signal_during_a_rollout_saves_the_boundary_before_it(number: signal.Signals, where: str) -> None:
    action = at(1, sent(number))
    made_of = {"engine": ToyEngine(during=action)} if where == "engine" else {"rewards": {"light": Light(action)}}
    ran, backend = stopped(plan(run={"max_steps": 9}), **made_of)
    # Step 2 is trained, step 3 is not, and what follows the signal in its rollout does not happen.
    assert ran.result == (3, "stopped") and ran.saved == [3] and len(backend.trained) == 1
    assert [event.step for event in ran.steps] == [3]


def test_a_boundary_that_is_saved_already_is_not_saved_again() -> None:
    ran, _ = stopped(plan(run={"max_steps": 9}), engine=ToyEngine(during=at(0, sent(signal.SIGTERM))))
    assert ran.result == (2, "stopped") and ran.saved == []


def test_a_new_run_that_is_stopped_before_its_first_step_can_be_resumed() -> None:
    with stop_on_signal() as stop:
        ran = run(
            parts(engine=ToyEngine(during=at(0, sent(signal.SIGTERM)))),
            plan(run={"max_steps": 9}),
            should_stop=lambda: stop.is_set,
            interrupting=stop.interrupting,
        )
    assert ran.result == (0, "stopped") and ran.saved == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_finishes_and_is_saved(number: signal.Signals) -> None:
    backend = ToyBackend(during=at(0, sent(number)))
    ran, _ = stopped(plan(run={"max_steps": 9}), backend=backend)
    assert ran.result == (3, "stopped") and ran.saved == [3] and len(backend.trained) == 1


def test_ctrl_c_lets_the_rollout_finish() -> None:
    ran, backend = stopped(plan(run={"max_steps": 9}), engine=ToyEngine(during=at(0, sent(signal.SIGINT))))
    assert ran.result == (3, "stopped") and ran.saved == [3] and len(backend.trained) == 1


def test_an_evaluation_is_interrupted_and_its_boundary_saved() -> None:
    toy = plan(run={"max_steps": 9})
    toy.eval.every = 1
    # The first call of the engine is the rollout of step 2, the second the evaluation behind it.
    ran, _ = stopped(toy, engine=ToyEngine(during=at(1, sent(signal.SIGTERM))), held_out=HELD_OUT)
    assert ran.result == (3, "stopped") and ran.saved == [3]
    assert not [event for event in ran.events if event.kind == "evaluated"]


def test_an_evaluation_that_was_not_made_is_made_up() -> None:
    toy = plan(run={"max_steps": 3})
    for start, every, expected in ((2, 1, [2, 3]), (2, 0, [3]), (3, 0, [3])):
        toy.eval.every = every
        ran = run(parts(), toy, start=start, held_out=HELD_OUT, was_evaluated=lambda step: False)
        assert [event.step for event in ran.events if event.kind == "evaluated"] == expected
        done = run(parts(), toy, start=start, held_out=HELD_OUT)
        assert [event.step for event in done.events if event.kind == "evaluated"] == [
            at for at in expected if at > start
        ]


def test_an_evaluation_that_fails_leaves_the_steps_before_it() -> None:
    def fail() -> None:
        raise RuntimeError("no reply")

    toy, ran = plan(run={"max_steps": 9}), Ran()
    toy.eval.every = 2
    # The calls of the engine: an evaluation, two rollouts, an evaluation.
    with pytest.raises(RunFailed, match="no reply"):
        run(parts(engine=ToyEngine(during=at(3, fail))), toy, held_out=HELD_OUT, into=ran)
    assert ran.saved == [2]


def test_a_rollout_on_another_thread_is_left(lets_go: threading.Event) -> None:
    """With rollouts ahead, the main thread waits for one: the signal ends the wait."""
    inside = threading.Event()

    def wait() -> None:
        inside.set()
        lets_go.wait(30)

    def interrupt() -> None:
        inside.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    ran, backend = stopped(plan(run={"max_steps": 9, "max_staleness": 1}), engine=ToyEngine(during=at(0, wait)))
    assert ran.result == (2, "stopped") and not backend.trained


@pytest.fixture
def lets_go() -> Any:
    event = threading.Event()
    yield event
    event.set()


def test_signals_of_a_scheduler_do_not_cut_off_the_save() -> None:
    """Slurm sends SIGUSR1 first, then SIGTERM; only a second Ctrl-C of a user stops at once."""
    with stop_on_signal() as stop:
        sent(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)()
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            sent(signal.SIGINT)()
    with stop_on_signal() as stop:
        sent(signal.SIGINT)()
        with pytest.raises(KeyboardInterrupt):
            sent(signal.SIGINT)()


def test_a_signal_that_came_before_interrupts_what_begins_later() -> None:
    stop = Stop()
    stop.ask(urgently=False)
    with stop.interrupting():
        pass
    stop.ask(urgently=True)
    with pytest.raises(Preempted), stop.interrupting():
        pytest.fail("it began")
