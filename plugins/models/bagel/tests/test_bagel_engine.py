"""BAGEL's images from vLLM-Omni, on a CPU and in fp32, against those of the trained module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.environments import make
from external_engines.latents import ROUNDING, adapter, assert_same, gap, trainside
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import EchoMismatch
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_engine
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ("a red ring", "two blue squares on the left", "it")
GUIDED: dict[str, Any] = {"guidance_scale": 3.0}
THREE_BRANCHES: dict[str, Any] = {
    "guidance_scale": 4.0,
    "guidance_mode": "text-image",
    "guidance_options": {"image_scale": 1.5, "low": 0.4, "renorm": "global"},
}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    make("vllm-omni")
    own = build(BagelConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(VllmOmniConfig(max_num_seqs=4), model=own, device="cpu")
    yield engine
    engine.close()


@pytest.fixture
def moving(model: BagelModel) -> BagelModel:
    """A copy of the trained model, to change."""
    return copy.deepcopy(model)


def asked(
    model: BagelModel, engine: ExternalLatentEngine, *, media: Any = lambda number: (), **settings: Any
) -> Request:
    """Two samples for each prompt, four steps of which two are stochastic."""
    usual = {"num_inference_steps": 4, "height": 64, "width": 48, "sde": SdeStepsConfig(mode="random", count=2)}
    return make_request(
        model,
        LatentSamplingConfig(**{**usual, **settings}),
        track="image",
        prompts=PROMPTS,
        media=media,
        samples_per_prompt=2,
        policy_version=engine.version,
    )


def check(engine: ExternalLatentEngine, model: BagelModel, request: Request) -> None:
    track = engine.generate(request)
    assert_same(track, trainside(model, request))
    assert gap(track, model) < ROUNDING


def test_the_checkpoint_is_read_as_it_is(engine: ExternalLatentEngine, model: BagelModel) -> None:
    """Prompts of different lengths in one batch, without guidance, by text, and by text and sources."""
    for settings in ({}, GUIDED, {**GUIDED, "negative_prompt": "blurred"}, THREE_BRANCHES):
        check(engine, model, asked(model, engine, **settings))
    assert max(engine.batches) == 4


def test_sources_are_encoded_as_in_training(
    engine: ExternalLatentEngine, model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """One source, one of another size, and two."""
    for settings in ({}, THREE_BRANCHES):
        check(engine, model, asked(model, engine, media=lambda number: media[number], **settings))


def test_it_continues_from_turns(
    engine: ExternalLatentEngine, model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """From its own texts as they were sampled, whole and cut, and from an image, behind a system prompt."""
    request = asked(model, engine, **THREE_BRANCHES, options={"system_prompt": "Plan first."})
    end = model.marks.end
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


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: ExternalLatentEngine, model: BagelModel) -> None:
    request = asked(model, engine, **THREE_BRANCHES)
    whole = engine.generate(request)
    assert_same(engine.generate(request.select([4])), whole.select([4]))


def test_it_samples_from_what_was_sent_last(engine: ExternalLatentEngine, moving: BagelModel) -> None:
    """All weights, then an adapter on both experts, then all weights again."""
    perturb(moving, seed=1)
    engine.load_weights(full_update(moving, version=1))
    check(engine, moving, asked(moving, engine, **GUIDED))
    update, added = adapter(moving, targets=moving.spec.lora_targets, version=2)
    engine.load_weights(update)
    adapted = with_adapter(copy.deepcopy(moving), added)
    track = engine.generate(asked(moving, engine, **GUIDED))
    assert gap(track, adapted) < ROUNDING < gap(track, moving)
    perturb(moving, seed=2)
    engine.load_weights(full_update(moving, version=3))
    check(engine, moving, asked(moving, engine))


def test_weights_of_other_names_change_nothing(engine: ExternalLatentEngine, moving: BagelModel) -> None:
    engine.load_weights(full_update(moving, version=4))
    update = full_update(moving, version=5)
    tensors = {name.replace("_moe_gen", "_other"): value for name, value in update.tensors.items()}
    with pytest.raises(EchoMismatch):
        engine.load_weights(dataclasses.replace(update, tensors=tensors))
    check(engine, moving, asked(moving, engine))


def test_rows_join_and_leave_a_batch_between_steps(
    tiny_folder: Path, model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """Of prompts and sources of different sizes, each behind its own keys and values. Texts are written as ever."""
    make("vllm-omni")
    own = build(BagelConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(VllmOmniConfig(max_num_seqs=4, step_batching=True), model=own, device="cpu")
    try:
        for given in (lambda number: (), lambda number: media[number]):
            check(engine, model, asked(model, engine, media=given, **THREE_BRANCHES))
            texts = make_request(
                model,
                TextSamplingConfig(max_new_tokens=8),
                track="text",
                prompts=PROMPTS,
                media=given,
                policy_version=engine.version,
            )
            expected = trainside(model, texts)
            assert [row.tolist() for row in engine.generate(texts).text.tokens] == [
                row.tolist() for row in expected.text.tokens
            ]
    finally:
        engine.close()
