"""Critics: initialisation, training, checkpoints, and separation from the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.judged import Judged, critic_values
from unirl.conformance.doubles.requests import make_text_request
from unirl.conformance.doubles.rollouts import sample_text
from unirl.conformance.doubles.text_model import TextWorkbenchModel
from unirl.conformance.doubles.text_surrogate import TextSurrogate
from unirl.conformance.doubles.trainee import Training
from unirl.conformance.fixtures.backend import BackendBench, refuses
from unirl.core.errors import CheckpointError, RecipeError
from unirl.core.roles import Backend, Job
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track

RATE = 1e-3
"""Of the critic, as `enabled_by` sets it."""
ADAMW = {"betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.0}
BOUND = 2e-3
"""In units of the learning rate, after two steps: gradients differ by fp32 rounding, and Adam divides them by no less
than eps. A row that weighs otherwise, or a weight that does not train, is 1e-1 and more."""


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_critic_starts_at_zero_and_trains_by_torchs_adamw(bench: BackendBench) -> None:
    """A critic is a copy of the model with a scalar output, initially 0. Two updates change its values as torch's AdamW
    does on such a copy, one completion at a time, for a whole batch and for micro-batches by tokens.

    If it fails: the output starts at 0, all of the copy trains, dropout is off, its rate is its own, and its loss is
    divided by what `critic_weights` says over all micro-batches.
    """
    tracks = [_track(number) for number in range(2)]
    expected = torch.cat(critic_values(tracks, tracks[0], lr=RATE, **ADAMW))
    for train in (TrainConfig(), TrainConfig(micro_batch_tokens=60)):
        with _backend(bench, train=train) as backend:
            first = _values(backend, tracks[0])
            assert not bool(first.any()), f"before any update a value is {float(first.abs().max()):.3g}; it must be 0"
            for track in tracks:
                backend.train([Job(track=track.to(bench.device), algorithm=Judged())], progress=0.0)
            result = _values(backend, tracks[0])
        gap = float((result - expected).abs().max()) / RATE
        bench.record(f"values off, in learning rates, {train.micro_batch_tokens or 'all'} tokens", gap, bound=BOUND)


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_critic_stays_with_the_backend(bench: BackendBench) -> None:
    """Exported weights contain no weights of the critic, and are bit for bit the same as if the critic had not been
    trained.

    The algorithm's advantages do not depend on the critic here, so neither may the policy.

    If it fails: keep the critic out of the trained module and of its optimizer: a shared trunk, a shared norm of
    gradients or a shared list of parameters lets it into the policy.
    """
    for training in bench.trainings:
        sent: list[dict[str, Tensor]] = []
        for is_learning in (True, False):
            with _backend(bench, training=training) as backend:
                for number in range(2):
                    track = _track(number)
                    rewards = track.rewards
                    assert rewards is not None
                    still = dataclasses.replace(track, rewards=rewards * 0)
                    backend.train(
                        [Job(track=(track if is_learning else still).to(bench.device), algorithm=Judged())],
                        progress=0.0,
                    )
                sent.append(
                    {name: value.clone() for name, value in backend.export_weights(kind=training).tensors.items()}
                )
        with _backend(bench, training=training, has_critic=False) as plain:
            names = set(plain.export_weights(kind=training).tensors)
        extra = sorted(set(sent[0]) ^ names)
        assert not extra, f"{training}: with a critic the weights for engines differ in names, such as {extra[0]!r}"
        differ = [name for name in sent[0] if not torch.equal(sent[0][name], sent[1][name])]
        assert not differ, f"{training}: what the critic learns changes the policy, such as {differ[0]!r}"


@claim("backend", track="text", proves=Cap.CRITIC)
def test_a_resumed_critic_is_the_uninterrupted_one(bench: BackendBench) -> None:
    """Two updates, a checkpoint, a new process and two more updates equal four updates of the critic, bit for bit; a
    backend with a critic rejects a checkpoint without one.

    If it fails: save the critic's weights, and its optimizer's moments and step counts, beside those of the policy.
    """
    folder, other = bench.folder / "with", bench.folder / "without"
    with _backend(bench) as straight:
        _train(straight, 0, 1, device=bench.device)
        straight.save(folder)
        _train(straight, 2, 3, device=bench.device)
        expected = _values(straight, _track(0))
    with _backend(bench, has_critic=False) as plain:
        plain.save(other)
    with _backend(bench) as resumed:
        with refuses(CheckpointError, "a checkpoint without a critic, by a backend that keeps one,"):
            resumed.load(other)
        _train(resumed, 5, device=bench.device)
        resumed.load(folder)
        _train(resumed, 2, 3, device=bench.device)
        result = _values(resumed, _track(0))
    bench.record("largest difference of a value", float((result - expected).abs().max()), bound=0.0)


@claim("backend", track="text", proves=Cap.CRITIC)
def test_values_without_a_critic_are_refused(bench: BackendBench) -> None:
    """A backend without a critic raises when asked for values, or to train an algorithm that needs them.

    If it fails: raise a RecipeError in `with_values`, and pass `critic=None` to the train stack, which raises.
    """
    with _backend(bench, has_critic=False) as backend:
        with refuses(RecipeError, "the values of a critic that is not kept"):
            backend.with_values(_track(0).to(bench.device))
        backend.train([Job(track=_track(0).to(bench.device), algorithm=TextSurrogate())], progress=0.0)


@contextmanager
def _backend(
    bench: BackendBench, *, training: Training | None = None, train: TrainConfig | None = None, has_critic: bool = True
) -> Iterator[Backend]:
    """A backend over a text model of its own, closed at the end."""
    caps = (Cap.CRITIC,) if has_critic else ()
    config = bench.config(training or bench.trainings[0], *caps, lr=1e-2, max_grad_norm=None, **ADAMW)
    model = TextWorkbenchModel(device=bench.device)
    result = bench.subject.found("backend")
    backend = bench.workshop.build(result, config, model=model, train=train or TrainConfig(), steps=100, seed=3)
    try:
        yield backend
    finally:
        backend.close()


def _train(backend: Backend, *numbers: int, device: str) -> None:
    for number in numbers:
        backend.train([Job(track=_track(number).to(device), algorithm=Judged())], progress=0.0)


def _values(backend: Backend, track: Track) -> Tensor:
    values = backend.with_values(track).text.values
    assert values is not None, "with_values() gave a track without values"
    return torch.cat([row.cpu() for row in values])


def _track(number: int) -> Track:
    """Six completions in two groups, sampled with the initial weights, with advantages and rewards; numbers differ."""
    model = TextWorkbenchModel()
    sampling = TextSamplingConfig(max_new_tokens=10, temperature=0.7, chat=False)
    track = sample_text(model, make_text_request(model, sampling, track="text", rollout=number))
    rewards = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5, -0.5]).roll(number)
    return dataclasses.replace(track, advantages=torch.tensor([1.3, -0.4, 0.7, -1.9, 0.2, 1.1]), rewards=rewards)
