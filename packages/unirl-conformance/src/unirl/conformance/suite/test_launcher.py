"""Launchers: the same run in other processes."""

from __future__ import annotations

import math
import time

from unirl.conformance.claims import claim
from unirl.conformance.doubles.processes import Running, patience
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.launcher import FAILURE, LauncherCase
from unirl.core.errors import RewardFailed, UniRLError
from unirl.loop.algorithm_state import algorithm_state, resume_algorithm

BOUND = 1e-6
"""Bound for fp32 numbers and weights of order 1: another process may add in another order, and nothing else differs."""


@claim("launcher")
def test_a_launched_run_gives_the_numbers_of_one_process(case: LauncherCase) -> None:
    """Two steps by the launcher give the rewards, losses, gradients and weights of two steps in this process.

    If it fails: look for a seed or a setting of the plan that does not reach the workers, rows that come back in
    another order, and weights that reach the rollout one step late.
    """
    plan = case.plan()
    with case.in_process(plan) as cell:
        expected = [cell.run(step) for step in range(2)]
        weights = cell.weights()
    with case.launched(plan) as cell:
        result = [cell.run(step) for step in range(2)]
        assert cell.backend.version == 2, f"version {cell.backend.version} after two updates"
        gap = largest_gap(cell.weights(), weights)
    for step, (here, there) in enumerate(zip(expected, result, strict=True)):
        missing = sorted(here.keys() - there.keys())
        assert not missing, f"step {step}: the launched run does not report {missing[0]!r}"
        for name, value in here.items():
            same = math.isclose(value, there[name], rel_tol=BOUND, abs_tol=BOUND)
            assert same, f"step {step}: {name} is {value:g} in one process and {there[name]:g} when launched"
    case.record("gap of the weights", gap, bound=BOUND)


@claim("launcher")
def test_checkpoints_move_between_launchers(case: LauncherCase) -> None:
    """A launched run resumes from a checkpoint of this process, and this process from one of the launched run; both end
    where two uninterrupted steps end.

    If it fails: pass `save` and `load` on to every rank of the backend, and refuse nothing because of where it ran.
    """
    plan = case.plan()
    with case.in_process(plan) as cell:
        cell.run(0)
        first = case.save(cell, "first")
        state = algorithm_state(cell.parts.only.algorithm)
        cell.run(1)
        expected = cell.weights()
    with case.launched(plan) as cell:
        cell.backend.load(first)
        resume_algorithm(cell.parts.only.algorithm, state, folder=first)
        cell.run(1)
        second = case.save(cell, "second")
        case.record("gap of the weights, launched", largest_gap(cell.weights(), expected), bound=BOUND)
    with case.in_process(plan) as cell:
        cell.backend.load(second)
        assert cell.backend.version == 2, f"a checkpoint of two steps is loaded as {cell.backend.version}"
        case.record("gap of the weights, back in process", largest_gap(cell.weights(), expected), bound=BOUND)


@claim("launcher")
def test_errors_of_parts_keep_their_type_and_message(case: LauncherCase) -> None:
    """An error raised for the user by a part arrives with its class and message, wherever the part runs.

    If it fails: send errors of UniRL across as they are, and add where they come from as a note.
    """
    with case.launched(case.failing_plan()) as cell:
        try:
            cell.run(0)
        except RewardFailed as error:
            assert FAILURE in str(error), f"{FAILURE!r} was raised by the reward; {str(error)!r} arrived"
            return
        except Exception as error:
            raise AssertionError(
                f"the reward raised a RewardFailed; a {type(error).__name__} arrived: {error}"
            ) from error
    raise AssertionError("the reward failed, and the step went on")


@claim("launcher")
def test_a_launch_that_fails_leaves_nothing_behind(case: LauncherCase) -> None:
    """When a part cannot be built, `launch` raises an error for the user and has ended every process that it started.

    If it fails: close everything in an `except BaseException` of `launch`, before the error is raised again.
    """
    plan = case.plan_without_checkpoint()
    launcher = case.launcher(plan)
    before, began = Running.now(), time.monotonic()
    try:
        launcher.launch(plan, catalog=case.factory.catalog)
    except UniRLError:
        left = before.left(within_s=patience(time.monotonic() - began))
        assert not left, f"left behind after a launch that failed: {', '.join(left)}"
    else:
        raise AssertionError("a model without a checkpoint was launched")
    finally:
        launcher.close()


@claim("launcher")
def test_a_closed_launcher_leaves_nothing_behind(case: LauncherCase) -> None:
    """After `close` no process of the run is left, and closing again is not an error.

    If it fails: keep the handles of all that was started, end them in `close`, and forget them.
    """
    plan = case.plan()
    before, began = Running.now(), time.monotonic()
    launcher = case.launcher(plan)
    try:
        launcher.launch(plan, catalog=case.factory.catalog)
        start_s = time.monotonic() - began
    finally:
        launcher.close()
    launcher.close()
    left = before.left(within_s=patience(start_s))
    assert not left, f"left behind after close: {', '.join(left)}"
