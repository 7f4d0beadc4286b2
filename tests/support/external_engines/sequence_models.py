"""Tests for every latent engine that runs a model which continues one sequence: a model's test module imports all of
them.

The module has the fixtures `engine`, see `started`, `model`, with the weights of the checkpoint, `media`, source images
of three prompts: one, one of another size, and two, and `guidances`, settings of each way to guide, the last one by
sources too where the model can.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import EchoMismatch
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.request import Request
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.model_host.unified.model import UnifiedModel

from .image_models import MAX_NUM_SEQS, started
from .latents import ROUNDING, adapter, asking, assert_same, gap, trainside

__all__ = [
    "moving",
    "test_a_row_does_not_depend_on_the_batch_that_it_is_made_in",
    "test_it_continues_from_turns",
    "test_it_samples_from_what_was_sent_last",
    "test_rows_join_and_leave_a_batch_between_steps",
    "test_samples_and_log_probs_are_those_that_the_trainer_would_have_made",
    "test_sources_are_encoded_as_in_training",
    "test_weights_of_other_names_change_nothing",
]

PROMPTS = ("a red ring", "two blue squares on the left", "it")

Model = UnifiedModel[Any]
Guidances = list[dict[str, Any]]


@pytest.fixture
def moving(model: Model) -> Model:
    """A copy of the trained model, to change."""
    return copy.deepcopy(model)


def asked(model: Model, engine: ExternalLatentEngine, *, media: Any = lambda number: (), **settings: Any) -> Request:
    """Two samples for each prompt, four steps of which two are stochastic."""
    usual = {"num_inference_steps": 4, "height": 64, "width": 48}
    return asking(model, prompts=PROMPTS, media=media, **usual)(engine, **settings)


def check(engine: ExternalLatentEngine, model: Model, request: Request) -> None:
    track = engine.generate(request)
    assert_same(track, trainside(model, request))
    assert gap(track, model) < ROUNDING


def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: ExternalLatentEngine, model: Model, guidances: Guidances
) -> None:
    """Prompts of different lengths in one batch, without guidance and with it."""
    engine.load_weights(full_update(model, version=1))
    for settings in ({}, *guidances, {**guidances[0], "negative_prompt": "blurred"}):
        check(engine, model, asked(model, engine, **settings))
    assert max(engine.batches) == MAX_NUM_SEQS


def test_sources_are_encoded_as_in_training(
    engine: ExternalLatentEngine, model: Model, media: list[tuple[MediaRef, ...]], guidances: Guidances
) -> None:
    """One source, one of another size, and two."""
    engine.load_weights(full_update(model, version=1))
    for settings in ({}, guidances[-1]):
        check(engine, model, asked(model, engine, media=lambda number: media[number], **settings))


def test_it_continues_from_turns(
    engine: ExternalLatentEngine, model: Model, media: list[tuple[MediaRef, ...]], guidances: Guidances
) -> None:
    """From its own texts as they were sampled, whole and cut, and from an image, behind a system prompt."""
    engine.load_weights(full_update(model, version=1))
    request = asked(model, engine, **guidances[-1], options={"system_prompt": "Plan first."})
    end = model.stop_tokens[0]
    each = (
        (Turn(stage="plan", text="x", tokens=(70, 71, end)),),
        (Turn(stage="plan", text="y", tokens=(72,)), Turn(stage="draw", media=media[0])),
        (Turn(stage="other", text="by another model"),),
    )
    turns = tuple(one for one in each for _ in range(2))
    request = dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, turns=turns))
    check(engine, model, request)
    without = dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, turns=None))
    one, other = (engine.generate(own).latent.latents for own in (request, without))
    assert float((one - other).abs().max()) > 100 * ROUNDING


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(
    engine: ExternalLatentEngine, model: Model, guidances: Guidances
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = asked(model, engine, **guidances[-1])
    whole = engine.generate(request)
    assert_same(engine.generate(request.select([4])), whole.select([4]))


def test_it_samples_from_what_was_sent_last(engine: ExternalLatentEngine, moving: Model, guidances: Guidances) -> None:
    """All weights, then an adapter on every layer that LoRA adapts, then all weights again."""
    perturb(moving, seed=1)
    engine.load_weights(full_update(moving, version=1))
    check(engine, moving, asked(moving, engine, **guidances[0]))
    update, added = adapter(moving, targets=moving.spec.lora_targets, version=2)
    engine.load_weights(update)
    adapted = with_adapter(copy.deepcopy(moving), added)
    track = engine.generate(asked(moving, engine, **guidances[0]))
    assert gap(track, adapted) < ROUNDING < gap(track, moving)
    perturb(moving, seed=2)
    engine.load_weights(full_update(moving, version=3))
    check(engine, moving, asked(moving, engine))


def test_weights_of_other_names_change_nothing(engine: ExternalLatentEngine, moving: Model) -> None:
    engine.load_weights(full_update(moving, version=4))
    update = full_update(moving, version=5)
    tensors = {name.replace("layers.0.", "layers.9."): value for name, value in update.tensors.items()}
    with pytest.raises(EchoMismatch):
        engine.load_weights(dataclasses.replace(update, tensors=tensors))
    check(engine, moving, asked(moving, engine))


def test_rows_join_and_leave_a_batch_between_steps(
    model: Model, media: list[tuple[MediaRef, ...]], guidances: Guidances
) -> None:
    """Of prompts and sources of different sizes, each behind its own keys and values, with the weights of the
    checkpoint: nothing is sent to this second engine."""
    with started("vllm-omni", model, step_batching=True) as stepping:
        for given in (lambda number: (), lambda number: media[number]):
            check(stepping, model, asked(model, stepping, media=given, **guidances[-1]))
