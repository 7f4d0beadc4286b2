"""Policies other than the live one, and restoring the live weights."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainer import Training, largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, POLICIES, BackendCase, refuses
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig

DECAY = 0.75
"""Decay that `enabled_by` sets, see `unirl.core.specs.spec.Spec.enabled_by`; not 0.5, where a decay that is taken for
its complement would not show."""

AVERAGE_BOUND = 1e-6
"""Relative to the largest weight: three moves, each rounded to 6e-8 of it two or three times."""


def check_reference(case: BackendCase, training: Training, cap: Cap) -> None:
    with case.backend(training, cap, **GRADIENT) as trainer:
        start = trainer.velocity()
        for number in range(2):
            trainer.train(case.track(number))
            trainer.backend.end_rollout()
        with trainer.backend.policy("reference"):
            inside = trainer.velocity()
        after, weights = trainer.velocity(), trainer.whole("reference")
        assert not torch.equal(after, start), "two updates changed nothing, so nothing can be told"
        case.record("gap of the velocity", float((inside - start).abs().max()), bound=0.0)
        case.record("gap of the exported weights", largest_gap(weights, trainer.plain), bound=0.0)


@claim("backend", proves=Cap.REFERENCE_ADAPTER_OFF)
def test_the_adapter_switched_off_is_the_initial_model(case: BackendCase) -> None:
    """After any number of updates the reference policy of LoRA training is the initial model, bit for bit.

    If it fails: see whether every adapted layer is switched off, whether a scale of 0 was used where the adapter may
    hold an infinity, and whether the base was merged into.
    """
    check_reference(case, "lora", Cap.REFERENCE_ADAPTER_OFF)


@claim("backend", proves=Cap.REFERENCE_COPY)
def test_the_reference_copy_is_the_initial_model(case: BackendCase) -> None:
    """After any number of updates the reference policy of full training is the initial model, bit for bit.

    If it fails: copy the weights when the backend is built, before any step, with separate memory, and in the
    dtype that trains.
    """
    check_reference(case, "full", Cap.REFERENCE_COPY)


@claim("backend")
def test_live_weights_are_restored_after_a_policy(case: BackendCase) -> None:
    """After `policy(...)`, even after an error inside it, the live weights are restored bit for bit, and training is
    unaffected.

    If it fails: restore in a `finally`, and swap weights rather than compute them back.
    """
    for training in case.trainings_with_policies:
        caps = case.extras(training)
        with case.backend(training, *caps) as trainer, case.backend(training, *caps) as twin:
            for one in (trainer, twin):
                one.train(case.track(0))
            weights, velocity = trainer.trained(), trainer.velocity()
            for policy in trainer.policies:
                for fails in (False, True):
                    try:
                        with trainer.backend.policy(policy):
                            if fails:
                                raise InterruptedError
                    except InterruptedError:
                        pass
                    how = f"{training}: after policy {policy!r}{' and an error inside' if fails else ''}"
                    assert torch.equal(trainer.velocity(), velocity), f"{how} the model computes something else"
                    assert largest_gap(trainer.trained(), weights) == 0, f"{how} the live weights are others"
            for one in (trainer, twin):
                one.train(case.track(1))
            gap = largest_gap(trainer.everything(), twin.everything())
        case.record(f"{training}: gap to a backend that nobody looked into", gap, bound=0.0)


@claim("backend", proves=Cap.EMA)
def test_the_average_follows_its_formula(case: BackendCase) -> None:
    """The average starts at the initial weights and moves with every optimizer step: 0.75 of it, 0.25 of the new ones.

    If it fails: see whether it moves after the step, once for each step, whether the decay is taken for 1 - decay, and
    whether a correction of the start or another schedule of decays is left on by `enabled_by`.
    """
    for training in case.trainings:
        with case.backend(training, Cap.EMA, **GRADIENT) as trainer:
            expected = doubles(trainer.trained())
            check_average(case, f"{training}, at the start", trainer.trained("ema"), expected)
            for number in range(3):
                trainer.train(case.track(number))
                expected = moved(expected, trainer.trained())
            before = trainer.trained("ema")
            check_average(case, f"{training}, after three steps", before, expected)
            trainer.backend.end_rollout()
            gap = largest_gap(trainer.trained("ema"), before)
            assert gap == 0, f"{training}: the average that follows steps moved at the end of a rollout"


@claim("backend", proves=Cap.LAGGED_POLICY)
def test_the_lagged_policy_follows_its_formula(case: BackendCase) -> None:
    """The lagged policy starts at the initial weights, stays put while a rollout is trained on, and moves at its end:
    0.75 of it, 0.25 of the live ones.

    If it fails: check that it moves only in `end_rollout`, however many updates a rollout has.
    """
    for training in case.trainings:
        with case.backend(training, Cap.LAGGED_POLICY, train=TrainConfig(updates_per_step=2), **GRADIENT) as trainer:
            expected = doubles(trainer.trained())
            check_average(case, f"{training}, at the start", trainer.trained("lagged"), expected)
            for number in range(3):
                before = trainer.trained("lagged")
                version = trainer.backend.version_of("lagged")
                trainer.train(case.track(number))
                gap = largest_gap(trainer.trained("lagged"), before)
                assert gap == 0, f"{training}: the lagged policy moved within a rollout"
                expected = moved(expected, trainer.trained())
                trainer.backend.end_rollout()
                versions = trainer.backend.version_of("lagged"), trainer.exported_version("lagged")
                assert versions[0] == versions[1] > version, (
                    f"{training}: it moved from version {version} to {versions[0]}, exported as {versions[1]}"
                )
            check_average(case, f"{training}, after three rollouts", trainer.trained("lagged"), expected)


def doubles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in tensors.items()}


def moved(average: dict[str, Tensor], live: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: DECAY * value + (1 - DECAY) * live[name].double() for name, value in average.items()}


def check_average(case: BackendCase, when: str, result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    size = max(float(value.abs().max()) for value in expected.values())
    case.record(f"{when}: relative gap", largest_gap(doubles(result), expected) / size, bound=AVERAGE_BOUND)


@claim("backend")
def test_a_policy_that_is_not_kept_is_refused(case: BackendCase) -> None:
    """Requesting a policy that the settings do not keep is an error that names it, instead of returning another
    policy's weights.

    If it fails: raise a RecipeError that names the setting, in `policy` and in `weights`.
    """
    tried = 0
    for training in case.trainings:
        with case.backend(training) as trainer:
            for policy in POLICIES[training].keys() - set(trainer.policies):
                asked = f"{training}: policy {policy!r}, of which the settings keep none,"
                with refuses(RecipeError, asked), trainer.backend.policy(policy):
                    pass
                with refuses(RecipeError, f"{asked} requested as weights,"):
                    trainer.trained(policy)
                tried += 1
    if not tried:
        raise NotApplicable(f"backend {case.spec.name!r} keeps every policy by default")
