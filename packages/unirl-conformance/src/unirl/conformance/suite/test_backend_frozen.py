"""What a model has frozen, and a model without values."""

from __future__ import annotations

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.model import WorkbenchModel
from unirl.conformance.doubles.trainee import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendBench, refuses
from unirl.core.errors import RecipeError
from unirl.core.roles import Policy
from unirl.core.specs.capability import Cap

FROZEN = "blocks.0."
MOVES = "blocks.1.up.weight"


@claim("backend")
def test_frozen_weights_stay_frozen(bench: BackendBench) -> None:
    """Weights that the model has frozen are the same bits after training, under every policy, and get no adapters,
    while the others train: a model decides which of its parts may move, such as all but its vision tower.

    If it fails: train the parameters that require a gradient when the backend takes the model, and no others; give
    adapters to layers whose weight requires one; leave weight decay and averages to those.
    """
    for training in bench.trainings:
        model = bench.model()
        model.net.blocks[0].requires_grad_(False)
        settings = {**GRADIENT, "weight_decay": 0.02}
        with bench.backend(training, *bench.extras(training), model=model, **settings) as trainee:
            adapted = [name for name in trainee.trained() if training == "lora" and name.startswith(FROZEN)]
            for number in range(2):
                trainee.train(bench.track(number))
                trainee.backend.end_rollout()
            policies: list[Policy] = ["live", *trainee.policies]
            weights = {policy: trainee.whole(policy) for policy in policies}
        assert not adapted, f"{training}: a frozen layer got an adapter, {adapted[0]!r}"
        for policy, tensors in weights.items():
            moved = [
                name
                for name, value in trainee.plain.items()
                if name.startswith(FROZEN) and not torch.equal(tensors[name], value)
            ]
            assert not moved, f"{training}, policy {policy!r}: {len(moved)} frozen weights moved, such as {moved[0]!r}"
        still = torch.equal(weights["live"][MOVES], trainee.plain[MOVES])
        assert not still, f"{training}: {MOVES!r} is not frozen, and did not move"


@claim("backend")
def test_a_model_that_is_frozen_whole_is_refused(bench: BackendBench) -> None:
    """A model all of whose weights are frozen cannot be trained, and the backend says so when it is built, not after a
    run in which nothing was learnt.

    If it fails: raise a RecipeError in `build` when no parameter of `trainable` requires a gradient.
    """
    for training in bench.trainings:
        model = bench.model()
        model.net.requires_grad_(False)
        with refuses(RecipeError, f"{training}: a model that is frozen whole"), bench.backend(training, model=model):
            pass


@claim("backend", proves=Cap.LAZY_BUILD)
def test_a_model_without_values_trains_as_one_with_them(bench: BackendBench) -> None:
    """A model that was built lazily is filled by the backend, and then has the weights, adapters and policies of an
    eager build, bit for bit, at the start and after training. So has one that it holds for others, a teacher.

    If it fails: fill every parameter that was on the meta device, and persistent buffers, under the names of the plain
    module; make adapters and copies of weights from tensors with values, and adapters from the seed alone.
    """
    for training in bench.trainings:
        results: list[dict[str, torch.Tensor]] = []
        for lazy in (False, True):
            model = WorkbenchModel(device=bench.device, lazy=lazy)
            with bench.backend(training, *bench.extras(training), model=model) as trainee:
                start = {f"start, {name}": value for name, value in trainee.everything().items()}
                trainee.train(bench.track())
                if lazy:
                    teacher = WorkbenchModel(device=bench.device, seed=1, lazy=True)
                    teacher.net.requires_grad_(False)
                    trainee.backend.hold_frozen(teacher)
                    whole = WorkbenchModel(device=bench.device, seed=1)
                    gap = trainee.velocity(teacher.velocity) - trainee.velocity(whole.velocity)
                    bench.record(f"{training}: gap of a teacher's velocities", float(gap.abs().max()), bound=0.0)
                results.append({**start, **trainee.everything()})
        eager, filled = results
        bench.record(f"{training}: gap of the weights", largest_gap(filled, eager), bound=0.0)
