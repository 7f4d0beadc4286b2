"""Tests for every text engine with a model that reads images: an engine's test module imports all of them.

It has a fixture `engine` over `folder`, with room for adapters and `faulty`, and gets the other fixtures from here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import DataError, RunFailed
from unirl.core.roles import TextModel
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track
from unirl.engine_host.program import Product
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.models.qwen_vl import tiny
from unirl.models.qwen_vl.config import QwenVlConfig
from unirl.models.qwen_vl.model import QwenVlModel, build, build_qwen3
from unirl.numerics.tokens.rollout import text_conditions

from .latents import Fault, fault
from .text_engines import (
    test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated,
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_greedy_texts_are_those_of_the_trainer,
    test_log_probs_are_those_of_the_weights_at_the_sampling_temperature,
)
from .texts import ROUNDING, Ask, gap

__all__ = [
    "ask",
    "build_model",
    "fault",
    "faulty",
    "folder",
    "kind",
    "model",
    "test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated",
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent",
    "test_greedy_texts_are_those_of_the_trainer",
    "test_images_that_the_engine_did_not_read_are_missed_in_its_reply",
    "test_log_probs_are_those_of_the_weights_at_the_sampling_temperature",
    "test_one_instruction_over_two_images_gives_each_its_own_log_probs",
    "test_prompts_and_images_that_do_not_belong_together_are_refused",
    "test_the_same_patches_in_another_shape_are_another_image",
]

PROMPTS = ("What is it?", "What is it?", "Which of them is red?")
"""The first two have the same tokens over different images; the third has two images of other sizes."""


@pytest.fixture(scope="module", params=["qwen25-vl", "qwen3-vl"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / kind
    (tiny.write_qwen3 if kind == "qwen3-vl" else tiny.write)(made, seed=0)
    return made


def build_model(kind: str, folder: Path) -> QwenVlModel:
    """Fresh, with the weights of the checkpoint."""
    return (build_qwen3 if kind == "qwen3-vl" else build)(QwenVlConfig(path=str(folder)), device="cpu")


@pytest.fixture
def model(kind: str, folder: Path) -> QwenVlModel:
    """A model that tests may modify."""
    return build_model(kind, folder)


@pytest.fixture(scope="module")
def ask(kind: str, folder: Path) -> Ask:
    """A request of two samples for each prompt; the version is the engine's."""
    model = build_model(kind, folder)

    def media(number: int) -> tuple[MediaRef, ...]:
        # Those of 2 and 5 are of one size.
        return tuple(ref for image in ((2,), (5,), (0, 1))[number] for ref in tiny.media(folder, number=image))

    def make(engine: ExternalTextEngine, *, seed: int = 0, **settings: Any) -> Request:
        return make_request(
            model,
            TextSamplingConfig(**{"max_new_tokens": 16, **settings}),
            track="text",
            prompts=PROMPTS,
            media=media,
            samples_per_prompt=2,
            seed=seed,
            policy_version=engine.version,
        )

    return make


def faulty(product: Product) -> Product:
    """The product with a server whose faults can be switched on, see `image_faults`."""
    ours = ("external_engines.faults", "external_engines.image_faults")
    environment = dataclasses.replace(
        product.environment,
        serve=f"external_engines.image_faults:{product.environment.name.replace('-', '_')}",
        modules=(*product.environment.modules, *ours),
    )
    return dataclasses.replace(product, environment=environment)


@pytest.mark.parametrize("name", ["swaps_images", "shows_images_of_others", "drops_images"])
def test_images_that_the_engine_did_not_read_are_missed_in_its_reply(
    name: str, engine: ExternalTextEngine, model: TextModel, ask: Ask, fault: Fault
) -> None:
    """Rows of equal tokens over images of one size, so that only the reply tells them apart: the host compares no
    log-probs."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0, 2])
    fault(name)
    with pytest.raises(RunFailed, match="the completion of row 0 was generated from other media than its own"):
        engine.generate(request)
    fault("")
    assert gap(engine.generate(request), model) < ROUNDING


def test_one_instruction_over_two_images_gives_each_its_own_log_probs(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """Sent three times in another order, because whatever an engine keeps by tokens alone shows the first image to
    both. The images of each row come back, each input once, bit for bit as training makes them."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    assert request.text.prompt_tokens[0].tolist() == request.text.prompt_tokens[2].tolist()
    for order in (range(6), (4, 3, 1, 5, 0, 2), (2, 0)):
        asked = request.select(order)
        track = engine.generate(asked)
        assert gap(track, model) < ROUNDING
        expected = text_conditions(model, asked.inputs, sampling=asked.text.sampling)
        assert expected is not None
        result = track.conditions["positive"]
        assert same(result.expanded(), expected.expanded())
        assert len(result.values["pixel_values"]) == len(set(asked.inputs.ids))
    # Random images move log-probs of random weights by 1e-2 and more, so that the bound above tells them apart.
    assert gap(with_images_of(request.select([2, 3]), engine.generate(request.select([0, 1])), model), model) > 1e-2


def test_the_same_patches_in_another_shape_are_another_image(
    engine: ExternalTextEngine, model: TextModel, ask: Ask, tmp_path: Path
) -> None:
    """Wide and tall images of one colour differ in their grids alone, and so in the positions of their tokens."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0, 2])
    media: list[tuple[MediaRef, ...]] = []
    for size in ((56, 28), (28, 56)):
        file = tmp_path / f"{size[0]}.png"
        Image.new("RGB", size, (200, 30, 30)).save(file)
        media.append((MediaRef(modality="image", role="condition", uri=str(file)),))
    inputs = dataclasses.replace(request.inputs, media=tuple(media))
    tokens = model.prompt_tokens(inputs, sampling=request.text.sampling)
    assert tokens[0].tolist() == tokens[1].tolist()
    params = dataclasses.replace(request.text, prompt_tokens=tuple(tokens))
    track = engine.generate(dataclasses.replace(request, inputs=inputs, params=params))
    wide, tall = track.conditions["positive"].expanded()["pixel_values"]
    assert torch.equal(wide, tall)
    assert gap(track, model) < ROUNDING


def with_images_of(request: Request, track: Track, model: TextModel) -> Track:
    conditions = text_conditions(model, request.inputs, sampling=request.text.sampling)
    assert conditions is not None
    return dataclasses.replace(track, conditions={"positive": conditions})


def test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent(
    engine: ExternalTextEngine, model: TextModel, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0])
    (good,) = request.inputs.media[0]
    content = Path(good.uri).read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    process: Any = engine._process
    for name, message in (("gone.png", "it cannot be opened"), ("cut.png", "the image is broken")):
        bad = dataclasses.replace(good, uri=str(tmp_path / name))
        inputs = dataclasses.replace(request.inputs, media=((bad,),))
        with monkeypatch.context() as patched, pytest.raises(DataError, match=rf"{name}' \(condition\): {message}"):
            patched.setattr(process, "call", lambda *_, **__: pytest.fail("something was sent"))
            engine.generate(dataclasses.replace(request, inputs=inputs))
    assert gap(engine.generate(request), model) < ROUNDING


def test_prompts_and_images_that_do_not_belong_together_are_refused(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """The third prompt shows two images. The engine still works afterwards."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0, 1])
    other = ask(engine).select([4, 5]).text.prompt_tokens
    params = dataclasses.replace(request.text, prompt_tokens=other)
    with pytest.raises(RunFailed, match="prompt shows 2 images"):
        engine.generate(dataclasses.replace(request, params=params))
    assert gap(engine.generate(request), model) < ROUNDING
