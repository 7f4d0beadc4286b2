"""State that an algorithm carries from step to step, across a resume."""

from __future__ import annotations

import json

from unirl.conformance.claims import claim
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs
from unirl.conformance.fixtures.algorithm import AlgorithmCase
from unirl.conformance.fixtures.training_setup import TrainingSetup
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import Algorithm
from unirl.core.types.track import Track
from unirl.loop.algorithm_state import algorithm_state

STEPS = 3


@claim("algorithm", track="any")
def test_a_resumed_algorithm_goes_on_as_it_was(case: AlgorithmCase) -> None:
    """An algorithm with state besides the weights, such as an adaptive coefficient, puts all of it into a checkpoint: a
    new one that takes the state, as JSON, has the gradient of the old one bit for bit, and
    so have the steps after it. Updates leave the state alone, so that copies on other ranks, which get it with each
    call of train, agree; and a copy that was at another step goes back to the one that it is given.

    What a critic makes of rewards is made with this state too, so with one every step begins at the old-log-prob pass.

    Tried with the settings that `stateful` of the spec names; without any, the algorithm must keep no state.

    If it fails: everything that `end_step()` changes and a loss reads belongs into `state()`, and `load_state()` puts
    all of it back. Nothing else may change it.
    """
    settings = dict(case.spec.stateful)
    if not settings:
        for on in case.variants():
            kept = algorithm_state(case.algorithm(case.config(on)))
            assert not kept, f"it keeps the state {kept}, and its spec names no settings of it in `stateful`"
        raise NotApplicable(f"algorithm {case.spec.name!r} keeps nothing from step to step")
    setup = case.setup([key for key in case.spec.when if key in settings], is_ragged=True, **settings)
    fresh, old = case.algorithm(setup.config), setup.algorithm
    start = algorithm_state(old)
    assert start, f"the spec says that it keeps a state with {settings}, and state() gives none"
    track = setup.with_old_log_probs() if setup.critic is None else setup.track
    setup.move()
    for _ in range(STEPS):
        _step(setup, track, old)
    later = algorithm_state(old)
    assert later != start, (
        f"{STEPS} steps left its state as it was, {start}: with these settings a step changes nothing"
    )
    resumed = _with_state(case.algorithm(setup.config), later)
    assert algorithm_state(resumed) == later, f"given the state {later}, it says {algorithm_state(resumed)}"
    _check_same_gradient(case, setup, track, resumed, old, when="resumed")
    _step(setup, track, resumed)
    _step(setup, track, old)
    after, expected = algorithm_state(resumed), algorithm_state(old)
    assert after == expected, f"a step after the resume its state is {after}; without the resume it is {expected}"
    _check_same_gradient(case, setup, track, resumed, old, when="a step after it")
    _check_same_gradient(case, setup, track, _with_state(old, start), fresh, when="back at the start")


def _step(setup: TrainingSetup, track: Track, algorithm: Algorithm) -> None:
    """One step of a run, whose weights stay."""
    before = algorithm_state(algorithm)
    report, _ = setup.train(track, algorithm=_from_there(setup, algorithm), micro_batch_size=4)
    after = algorithm_state(algorithm)
    assert after == before, f"an update changed its state from {before} to {after}; end_step() alone may do that"
    result = algorithm.end_step({**report.only, "samples": float(track.num_rows)})
    wrong = {name: number for name, number in result.items() if number != number or abs(number) == float("inf")}
    assert not wrong, f"end_step() gave numbers for the log that are none: {wrong}"


def _from_there(setup: TrainingSetup, algorithm: Algorithm) -> Algorithm:
    """For the track that this claim trains on, which is anchored already where there is no critic."""
    return KeepsOldLogProbs(algorithm) if setup.critic is None else algorithm


def _with_state(algorithm: Algorithm, state: dict[str, object]) -> Algorithm:
    algorithm.load_state(json.loads(json.dumps(state)))
    return algorithm


def _check_same_gradient(
    case: AlgorithmCase, setup: TrainingSetup, track: Track, result: Algorithm, expected: Algorithm, *, when: str
) -> None:
    pairs = zip(
        *(setup.train(track, algorithm=_from_there(setup, one))[1].values() for one in (result, expected)), strict=True
    )
    largest = max(float((mine - other).abs().max()) for mine, other in pairs)
    case.record(f"largest difference of a gradient, {when}", largest, bound=0.0)
