"""Fake scores: their start, their training, checkpoints, and separation from the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import PlainTraining, plain_of
from unirl.conformance.doubles.ppo import FakeScorePPO
from unirl.conformance.doubles.trainer import Trainer, Training, largest_gap
from unirl.conformance.fixtures.backend import BackendCase, refuses
from unirl.core.errors import CheckpointError, RecipeError, UniRLError
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track

RATE = 1e-3
"""Learning rate of the fake score, as `enabled_by` sets it."""
ADAMW = {"betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.0}
BOUND = 2e-3
"""In units of the learning rate, after two steps: gradients differ by fp32 rounding, and Adam divides them by no less
than eps. A row that weighs otherwise, or a weight that does not train, is 1e-1 and more."""


@claim("backend", proves=Cap.FAKE_SCORE)
def test_a_fake_score_starts_as_the_policy_and_trains_by_torchs_adamw(case: BackendCase) -> None:
    """The policy `fake` has the initial weights at first, bit for bit. Two updates change them as torch's AdamW does on
    a copy, from the terms of `fake_score_loss` alone.

    If it fails: it has its own copy of what trains, its own optimizer and rate, one step for each update of the policy,
    and its loss is divided by what `fake_score_weights` says.
    """
    for training in case.trainings:
        with _backend(case, training) as trainer:
            assert largest_gap(trainer.trained("fake"), trainer.trained()) == 0, f"{training}: it starts as another one"
            plain = plain_of(trainer, lr=RATE, **ADAMW)
            for number in range(2):
                trainer.train(case.track(number), FakeScorePPO())
                _descend(plain, case.track(number))
            gap = largest_gap(trainer.trained("fake"), dict(plain.weights)) / RATE
        case.record(f"{training}: weights off, in learning rates", gap, bound=BOUND)


@claim("backend", proves=Cap.FAKE_SCORE)
def test_a_loss_of_the_fake_score_sees_the_live_policy(case: BackendCase) -> None:
    """While the fake score trains, the policy `live` has the weights of the policy, and no gradient.

    If it fails: the policy that `policy("live")` gives within that of the fake score, and what is restored after it.
    """
    for training in case.trainings:
        with _backend(case, training) as trainer:
            trainer.train(case.track(0), FakeScorePPO())
            algorithm = FakeScorePPO()
            live = _velocities(trainer, case.track(1))
            with trainer.backend.policy("fake"):
                fake = _velocities(trainer, case.track(1))
                with trainer.backend.policy("live"):
                    within = _velocities(trainer, case.track(1))
                again = _velocities(trainer, case.track(1))
            trainer.train(case.track(1), algorithm)
        seen, has_gradient = algorithm.seen[0]
        assert not has_gradient, f"{training}: the live policy has a gradient in a loss of the fake score"
        assert _gap(fake, live) > 0, f"{training}: an update of both left them the same"
        # All are the same forward of the same rows.
        case.record(f"{training}: the live policy in the loss", _gap(seen, live), bound=0.0)
        case.record(f"{training}: the live policy within the fake one", _gap(within, live), bound=0.0)
        case.record(f"{training}: the fake policy after that", _gap(again, fake), bound=0.0)


@claim("backend", proves=Cap.FAKE_SCORE)
def test_a_fake_score_stays_with_the_backend(case: BackendCase) -> None:
    """Training the fake score leaves every weight of the policy as it would be without it, bit for bit.

    If it fails: keep its gradients, its moments and its norm of gradients apart from those of the policy.
    """
    for training in case.trainings:
        sent: list[dict[str, Tensor]] = []
        for target in (1.0, -3.0):
            with _backend(case, training) as trainer:
                for number in range(2):
                    trainer.train(case.track(number), FakeScorePPO(target=target))
                sent.append(trainer.trained())
        case.record(f"{training}: largest difference of a weight", largest_gap(*sent), bound=0.0)


@claim("backend", proves=Cap.FAKE_SCORE)
def test_a_resumed_fake_score_is_the_uninterrupted_one(case: BackendCase) -> None:
    """Two updates, a checkpoint, a new backend and two more updates equal four updates, bit for bit; a backend with a
    fake score rejects a checkpoint without one.

    If it fails: save its weights, and its optimizer's moments and step counts, beside those of the policy.
    """
    for training in case.trainings:
        folder, other = case.folder / f"{training}-with", case.folder / f"{training}-without"
        with _backend(case, training) as straight:
            _train(case, straight, 0, 1)
            straight.backend.save(folder)
            _train(case, straight, 2, 3)
            expected = {**straight.trained("fake"), **{f"live {n}": w for n, w in straight.trained().items()}}
        with case.backend(training, **ADAMW) as plain:
            plain.backend.save(other)
        with _backend(case, training) as resumed:
            with refuses(CheckpointError, "a checkpoint without a fake score, by a backend that keeps one,"):
                resumed.backend.load(other)
            _train(case, resumed, 5)
            resumed.backend.load(folder)
            _train(case, resumed, 2, 3)
            result = {**resumed.trained("fake"), **{f"live {n}": w for n, w in resumed.trained().items()}}
        case.record(f"{training}: largest difference of a weight", largest_gap(result, expected), bound=0.0)


@claim("backend", proves=Cap.FAKE_SCORE)
def test_a_fake_score_that_is_not_kept_is_refused(case: BackendCase) -> None:
    """A backend without a fake score raises when asked for the policy `fake`, or to train an algorithm that needs it.

    If it fails: raise a RecipeError in `policy`, and pass `fake_score=None` to the train stack, which raises.
    """
    with case.backend(case.trainings[0], **ADAMW) as trainer:
        with refuses(RecipeError, "a fake score that is not kept"), trainer.backend.policy("fake"):
            pass
        with refuses(UniRLError, "an algorithm that trains a fake score, by a backend without one,"):
            trainer.train(case.track(0), FakeScorePPO())
        trainer.train(case.track(0))


@contextmanager
def _backend(case: BackendCase, training: Training) -> Iterator[Trainer]:
    with case.backend(training, Cap.FAKE_SCORE, lr=1e-2, max_grad_norm=None, **ADAMW) as trainer:
        yield trainer


def _train(case: BackendCase, trainer: Trainer, *numbers: int) -> None:
    for number in numbers:
        trainer.train(case.track(number), FakeScorePPO())


def _descend(plain: PlainTraining, track: Track) -> None:
    """One update with the loss of the fake score."""
    x, sigma = FakeScorePPO.points(track)
    velocity = plain.velocity()(x, sigma, track.conditions["positive"].expanded())
    errors = FakeScorePPO.errors(velocity, 1.0)
    plain.descend((errors * track.sample_weights).sum() / track.sample_weights.sum())


def _velocities(trainer: Trainer, track: Track) -> Tensor:
    """[n, ...] of the weights in use, at the points that `FakeScorePPO` asks for."""
    x, sigma = FakeScorePPO.points(track)
    conditions: Any = track.conditions["positive"].expanded()
    with torch.no_grad():
        return trainer.denoiser.velocity(x, sigma, conditions)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
