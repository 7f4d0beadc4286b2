"""Critics: initialisation, training, checkpoints, and separation from the policy."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import critic_values
from unirl.conformance.doubles.ppo import PPO, CriticPPO
from unirl.conformance.doubles.tiny_decoder import TinyDecoder
from unirl.conformance.doubles.trainer import Trainer, Training
from unirl.conformance.fixtures.backend import BackendCase, refuses
from unirl.core.errors import CheckpointError, RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track

RATE = 1e-3
"""Learning rate of the critic, as `enabled_by` sets it."""
ADAMW = {"betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.0}
BOUND = 2e-3
"""In units of the learning rate, after two steps: gradients differ by fp32 rounding, and Adam divides them by no less
than eps. A row that weighs otherwise, or a weight that does not train, is 1e-1 and more."""


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_critic_starts_at_zero_and_trains_by_torchs_adamw(case: BackendCase) -> None:
    """A critic is a copy of the model with a scalar output, initially 0. Two updates change its values as torch's AdamW
    does on such a copy, one completion at a time, for a whole batch and for micro-batches by tokens.

    If it fails: the output starts at 0, all of the copy trains, dropout is off, its rate is its own, and its loss is
    divided by what `critic_weights` says over all micro-batches.
    """
    tracks = [case.text_track(number) for number in range(2)]
    expected = torch.cat(critic_values([track.to("cpu") for track in tracks], tracks[0].to("cpu"), lr=RATE, **ADAMW))
    for train in (TrainConfig(), TrainConfig(micro_batch_tokens=60)):
        with _backend(case, Cap.CRITIC, train=train) as trainer:
            first = _values(trainer, tracks[0])
            assert not bool(first.any()), f"before any update a value is {float(first.abs().max()):.3g}; it must be 0"
            for track in tracks:
                trainer.train(track, CriticPPO())
            result = _values(trainer, tracks[0])
        gap = float((result - expected).abs().max()) / RATE
        case.record(f"values off, in learning rates, {train.micro_batch_tokens or 'all'} tokens", gap, bound=BOUND)


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_critic_stays_with_the_backend(case: BackendCase) -> None:
    """Exported weights contain no weights of the critic, and are bit for bit the same as if the critic had not been
    trained.

    The algorithm's advantages do not depend on the critic here, so neither may the policy.

    If it fails: keep the critic out of the trained module and of its optimizer: a shared trunk, a shared norm of
    gradients or a shared list of parameters lets it into the policy.
    """
    for training in case.trainings:
        sent: list[dict[str, Tensor]] = []
        for is_learning in (True, False):
            with _backend(case, Cap.CRITIC, training=training) as trainer:
                for number in range(2):
                    track = case.text_track(number)
                    assert track.rewards is not None
                    rewards = track.rewards if is_learning else track.rewards * 0
                    trainer.train(dataclasses.replace(track, rewards=rewards), CriticPPO())
                sent.append(trainer.trained())
        with _backend(case, training=training) as plain:
            names = set(plain.trained())
        extra = sorted(set(sent[0]) ^ names)
        assert not extra, f"{training}: with a critic the weights for engines differ in names, such as {extra[0]!r}"
        differ = [name for name in sent[0] if not torch.equal(sent[0][name], sent[1][name])]
        assert not differ, f"{training}: what the critic learns changes the policy, such as {differ[0]!r}"


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_resumed_critic_is_the_uninterrupted_one(case: BackendCase) -> None:
    """Two updates, a checkpoint, a new process and two more updates equal four updates of the critic, bit for bit; a
    backend with a critic rejects a checkpoint without one.

    If it fails: save the critic's weights, and its optimizer's moments and step counts, beside those of the policy.
    """
    folder, other = case.folder / "with", case.folder / "without"
    with _backend(case, Cap.CRITIC) as straight:
        _train(case, straight, 0, 1)
        straight.backend.save(folder)
        _train(case, straight, 2, 3)
        expected = _values(straight, case.text_track(0))
    with _backend(case) as plain:
        plain.backend.save(other)
    with _backend(case, Cap.CRITIC) as resumed:
        with refuses(CheckpointError, "a checkpoint without a critic, by a backend that keeps one,"):
            resumed.backend.load(other)
        _train(case, resumed, 5)
        resumed.backend.load(folder)
        _train(case, resumed, 2, 3)
        result = _values(resumed, case.text_track(0))
    case.record("largest difference of a value", float((result - expected).abs().max()), bound=0.0)


@claim("backend", track="text", proves=Cap.CRITIC)
def test_values_without_a_critic_are_refused(case: BackendCase) -> None:
    """A backend without a critic raises when asked for values, or to train an algorithm that needs them.

    If it fails: raise a RecipeError in `with_values`, and pass `critic=None` to the train stack, which raises.
    """
    with _backend(case) as trainer:
        with refuses(RecipeError, "the values of a critic that is not kept"):
            _values(trainer, case.text_track(0))
        trainer.train(case.text_track(0), PPO())


def _backend(
    case: BackendCase, *caps: Cap, training: Training | None = None, train: TrainConfig | None = None
) -> AbstractContextManager[Trainer]:
    """A backend over a separate text model."""
    model = TinyDecoder(device=case.device)
    settings = {"lr": 1e-2, "max_grad_norm": None, **ADAMW}
    return case.backend(training or case.trainings[0], *caps, model=model, train=train, **settings)


def _train(case: BackendCase, trainer: Trainer, *numbers: int) -> None:
    for number in numbers:
        trainer.train(case.text_track(number), CriticPPO())


def _values(trainer: Trainer, track: Track) -> Tensor:
    values = trainer.backend.with_values(track).text.values
    assert values is not None, "with_values() gave a track without values"
    return torch.cat([row.cpu() for row in values])
