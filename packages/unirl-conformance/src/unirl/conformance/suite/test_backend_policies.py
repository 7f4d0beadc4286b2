"""Policies other than the live one, and restoring the live weights."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainee import Training, largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, POLICIES, BackendBench, refuses
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig

DECAY = 0.75
"""What `enabled_by` sets, see `unirl.core.specs.spec.Spec.enabled_by`; not 0.5, where a decay that is taken for its
complement would not show."""

AVERAGE_BOUND = 1e-6
"""Relative to the largest weight: three moves, each rounded to 6e-8 of it two or three times."""


def check_reference(bench: BackendBench, training: Training, cap: Cap) -> None:
    with bench.backend(training, cap, **GRADIENT) as trainee:
        start = trainee.velocity()
        for number in range(2):
            trainee.train(bench.track(number))
            trainee.backend.end_rollout()
        with trainee.backend.policy("reference"):
            inside = trainee.velocity()
        after, weights = trainee.velocity(), trainee.whole("reference")
        assert not torch.equal(after, start), "two updates changed nothing, so nothing can be told"
        bench.record("gap of the velocity", float((inside - start).abs().max()), bound=0.0)
        bench.record("gap of the exported weights", largest_gap(weights, trainee.plain), bound=0.0)


@claim("backend", proves=Cap.REFERENCE_ADAPTER_OFF)
def test_the_adapter_switched_off_is_the_initial_model(bench: BackendBench) -> None:
    """After any number of updates the reference policy of LoRA training is the initial model, bit for bit.

    If it fails: see whether every adapted layer is switched off, whether a scale of 0 was used where the adapter may
    hold an infinity, and whether the base was merged into.
    """
    check_reference(bench, "lora", Cap.REFERENCE_ADAPTER_OFF)


@claim("backend", proves=Cap.REFERENCE_COPY)
def test_the_reference_copy_is_the_initial_model(bench: BackendBench) -> None:
    """After any number of updates the reference policy of full training is the initial model, bit for bit.

    If it fails: copy the weights when the backend is built, before any step, with memory of their own, and in the
    dtype that trains.
    """
    check_reference(bench, "full", Cap.REFERENCE_COPY)


@claim("backend")
def test_live_weights_are_restored_after_a_policy(bench: BackendBench) -> None:
    """After `policy(...)`, even after an error inside it, the live weights are restored bit for bit, and training is
    unaffected.

    If it fails: restore in a `finally`, and swap weights rather than compute them back.
    """
    for training in bench.trainings_with_policies:
        caps = bench.extras(training)
        with bench.backend(training, *caps) as trainee, bench.backend(training, *caps) as twin:
            for one in (trainee, twin):
                one.train(bench.track(0))
            weights, velocity = trainee.trained(), trainee.velocity()
            for policy in trainee.policies:
                for fails in (False, True):
                    try:
                        with trainee.backend.policy(policy):
                            if fails:
                                raise InterruptedError
                    except InterruptedError:
                        pass
                    how = f"{training}: after policy {policy!r}{' and an error inside' if fails else ''}"
                    assert torch.equal(trainee.velocity(), velocity), f"{how} the model computes something else"
                    assert largest_gap(trainee.trained(), weights) == 0, f"{how} the live weights are others"
            for one in (trainee, twin):
                one.train(bench.track(1))
            gap = largest_gap(trainee.everything(), twin.everything())
        bench.record(f"{training}: gap to a backend that nobody looked into", gap, bound=0.0)


@claim("backend", proves=Cap.EMA)
def test_the_average_follows_its_formula(bench: BackendBench) -> None:
    """The average starts at the initial weights and moves with every optimizer step: 0.75 of it, 0.25 of the new ones.

    If it fails: see whether it moves after the step, once for each step, whether the decay is taken for 1 - decay, and
    whether a correction of the start or another schedule of decays is left on by `enabled_by`.
    """
    for training in bench.trainings:
        with bench.backend(training, Cap.EMA, **GRADIENT) as trainee:
            expected = doubles(trainee.trained())
            check_average(bench, f"{training}, at the start", trainee.trained("ema"), expected)
            for number in range(3):
                trainee.train(bench.track(number))
                expected = moved(expected, trainee.trained())
            before = trainee.trained("ema")
            check_average(bench, f"{training}, after three steps", before, expected)
            trainee.backend.end_rollout()
            gap = largest_gap(trainee.trained("ema"), before)
            assert gap == 0, f"{training}: the average that follows steps moved at the end of a rollout"


@claim("backend", proves=Cap.LAGGED_POLICY)
def test_the_lagged_policy_follows_its_formula(bench: BackendBench) -> None:
    """The lagged policy starts at the initial weights, stays put while a rollout is trained on, and moves at its end:
    0.75 of it, 0.25 of the live ones.

    If it fails: see whether it moves in `end_rollout` alone, however many updates a rollout has.
    """
    for training in bench.trainings:
        with bench.backend(training, Cap.LAGGED_POLICY, train=TrainConfig(updates_per_step=2), **GRADIENT) as trainee:
            expected = doubles(trainee.trained())
            check_average(bench, f"{training}, at the start", trainee.trained("lagged"), expected)
            for number in range(3):
                before = trainee.trained("lagged")
                version = trainee.backend.version_of("lagged")
                trainee.train(bench.track(number))
                gap = largest_gap(trainee.trained("lagged"), before)
                assert gap == 0, f"{training}: the lagged policy moved within a rollout"
                expected = moved(expected, trainee.trained())
                trainee.backend.end_rollout()
                versions = trainee.backend.version_of("lagged"), trainee.exported_version("lagged")
                assert versions[0] == versions[1] > version, (
                    f"{training}: it moved from version {version} to {versions[0]}, exported as {versions[1]}"
                )
            check_average(bench, f"{training}, after three rollouts", trainee.trained("lagged"), expected)


def doubles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in tensors.items()}


def moved(average: dict[str, Tensor], live: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: DECAY * value + (1 - DECAY) * live[name].double() for name, value in average.items()}


def check_average(bench: BackendBench, when: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    size = max(float(value.abs().max()) for value in wanted.values())
    bench.record(f"{when}: relative gap", largest_gap(doubles(found), wanted) / size, bound=AVERAGE_BOUND)


@claim("backend")
def test_a_policy_that_is_not_kept_is_refused(bench: BackendBench) -> None:
    """Requesting a policy that the settings do not keep is an error that names it, instead of returning another
    policy's weights.

    If it fails: raise a RecipeError that names the setting, in `policy` and in `weights`.
    """
    tried = 0
    for training in bench.trainings:
        with bench.backend(training) as trainee:
            for policy in POLICIES[training].keys() - set(trainee.policies):
                asked = f"{training}: policy {policy!r}, of which the settings keep none,"
                with refuses(RecipeError, asked), trainee.backend.policy(policy):
                    pass
                with refuses(RecipeError, f"{asked} requested as weights,"):
                    trainee.trained(policy)
                tried += 1
    if not tried:
        raise NotApplicable(f"backend {bench.spec.name!r} keeps every policy by default")
