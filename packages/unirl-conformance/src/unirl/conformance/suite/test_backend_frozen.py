"""Frozen weights, and models without values."""

from __future__ import annotations

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase, refuses
from unirl.core.errors import RecipeError
from unirl.core.roles import Policy
from unirl.core.specs.capability import Cap

FROZEN = "blocks.0."
MOVES = "blocks.1.up.weight"


@claim("backend")
def test_frozen_weights_stay_frozen(case: BackendCase) -> None:
    """Weights that the model has frozen are the same bits after training, under every policy, and get no adapters,
    while the others train: a model decides which of its parts may move, such as all but its vision tower.

    If it fails: train the parameters that require a gradient when the backend takes the model, and no others; give
    adapters to layers whose weight requires one; leave weight decay and averages to those.
    """
    for training in case.trainings:
        model = case.model()
        model.net.blocks[0].requires_grad_(False)
        settings = {**GRADIENT, "weight_decay": 0.02}
        with case.backend(training, *case.extras(training), model=model, **settings) as trainer:
            adapted = [name for name in trainer.trained() if training == "lora" and name.startswith(FROZEN)]
            for number in range(2):
                trainer.train(case.track(number))
                trainer.backend.end_rollout()
            policies: list[Policy] = ["live", *trainer.policies]
            weights = {policy: trainer.whole(policy) for policy in policies}
        assert not adapted, f"{training}: a frozen layer got an adapter, {adapted[0]!r}"
        for policy, tensors in weights.items():
            moved = [
                name
                for name, value in trainer.plain.items()
                if name.startswith(FROZEN) and not torch.equal(tensors[name], value)
            ]
            assert not moved, f"{training}, policy {policy!r}: {len(moved)} frozen weights moved, such as {moved[0]!r}"
        still = torch.equal(weights["live"][MOVES], trainer.plain[MOVES])
        assert not still, f"{training}: {MOVES!r} is not frozen, and did not move"


@claim("backend")
def test_a_model_that_is_frozen_whole_is_refused(case: BackendCase) -> None:
    """A model all of whose weights are frozen cannot be trained, and the backend says so when it is built, not after a
    run in which nothing was learnt.

    If it fails: raise a RecipeError in `build` when no parameter of `trainable` requires a gradient.
    """
    for training in case.trainings:
        model = case.model()
        model.net.requires_grad_(False)
        with refuses(RecipeError, f"{training}: a model that is frozen whole"), case.backend(training, model=model):
            pass


@claim("backend", proves=Cap.LAZY_BUILD)
def test_a_model_without_values_trains_as_one_with_them(case: BackendCase) -> None:
    """A model that was built lazily is filled by the backend, and then has the weights, adapters and policies of an
    eager build, bit for bit, at the start and after training. So has one that it holds for others, a teacher.

    If it fails: fill every parameter that was on the meta device, and persistent buffers, under the names of the plain
    module; make adapters and copies of weights from tensors with values, and adapters from the seed alone.
    """
    for training in case.trainings:
        results: list[dict[str, torch.Tensor]] = []
        for lazy in (False, True):
            model = TinyDenoiser(device=case.device, lazy=lazy)
            with case.backend(training, *case.extras(training), model=model) as trainer:
                start = {f"start, {name}": value for name, value in trainer.everything().items()}
                trainer.train(case.track())
                if lazy:
                    teacher = TinyDenoiser(device=case.device, seed=1, lazy=True)
                    teacher.net.requires_grad_(False)
                    trainer.backend.hold_frozen(teacher)
                    whole = TinyDenoiser(device=case.device, seed=1)
                    gap = trainer.velocity(teacher.velocity) - trainer.velocity(whole.velocity)
                    case.record(f"{training}: gap of a teacher's velocities", float(gap.abs().max()), bound=0.0)
                results.append({**start, **trainer.everything()})
        eager, filled = results
        case.record(f"{training}: gap of the weights", largest_gap(filled, eager), bound=0.0)
