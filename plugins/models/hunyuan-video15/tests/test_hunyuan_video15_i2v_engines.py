"""HunyuanVideo 1.5 from a first frame in vLLM-Omni itself, on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.edits import *
from external_engines.edits import check_edit_run, with_media
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, asking_from_frames, gap
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import DataError
from unirl.core.specs.facts import names_in
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.hunyuan_video15 import tiny
from unirl.models.hunyuan_video15.config import HunyuanVideo15ImageConfig
from unirl.models.hunyuan_video15.image import HunyuanVideo15ImageModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ('a sign that says "STOP" beside a red ring', "a blue square on the left of two green discs", "")
"""Prompts of different lengths, one with quoted words; the first two are longer than their conditions."""


@pytest.fixture
def model(image_folder: Path) -> HunyuanVideo15ImageModel:
    """The trained module with the weights of the checkpoint, to be modified by tests. Its spec names its layers."""
    model: Any = build(HunyuanVideo15ImageConfig(path=str(image_folder)), device="cpu")
    model.spec = dataclasses.replace(model.spec, lora_targets=names_in(model.spec.lora_targets, model.trainable))
    return model


@pytest.fixture
def ask(model: HunyuanVideo15ImageModel, tmp_path: Path) -> Ask:
    """First frames of three ratios, two of which are cropped."""
    usual = {"height": 32, "width": 48, "frames": 9, "max_sequence_length": 32}
    return asking_from_frames(model, partial(tiny.media, tmp_path), prompts=PROMPTS, **usual)


@pytest.fixture
def edit(ask: Ask) -> Ask:
    return ask


@pytest.fixture(scope="module", params=["vllm-omni 0.30.0"])
def engine(request: pytest.FixtureRequest, image_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started(request.param, build(HunyuanVideo15ImageConfig(path=str(image_folder)), device="cpu")) as result:
        yield result


def test_conditions_have_features_and_latents_of_the_frame_beside_both_texts(
    engine: ExternalLatentEngine, model: HunyuanVideo15ImageModel, ask: Ask
) -> None:
    """In both branches of guidance; the frame's are the same in both. That they are the trainer's is shown beside."""
    engine.load_weights(full_update(model, version=1))
    guided = {"guidance_mode": "two-pass", "guidance_scale": 3.5, "negative_prompt": "blurred"}
    result = engine.generate(ask(engine, **guided).select([0, 2]))
    branches = {name: own.expanded() for name, own in result.conditions.items()}
    texts = {"prompt_embeds", "prompt_mask", "glyph_embeds", "glyph_mask"}
    assert set(branches) == {"positive", "negative"}
    for own in branches.values():
        assert set(own) == {*texts, "image_embeds", "first_frame"}
        # Four tokens of the image encoder; latents of 32 x 48 pixels.
        assert own["image_embeds"].shape == (2, 4, 16)
        assert own["first_frame"].shape == (2, 4, 1, 2, 3)
    for name in ("image_embeds", "first_frame"):
        assert torch.equal(branches["positive"][name], branches["negative"][name])
        assert not torch.equal(branches["positive"][name][0], branches["positive"][name][1])


def test_a_second_frame_and_one_that_would_lose_more_than_half_are_refused(
    engine: ExternalLatentEngine, model: HunyuanVideo15ImageModel, ask: Ask, tmp_path: Path
) -> None:
    """Before anything is sent, and the engine continues to work."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0])
    (media,) = request.inputs.media
    with pytest.raises(DataError, match="got 2 media of role 'source', of which it needs one"):
        engine.generate(with_media(request, (*media, *media)))
    tall = tiny.media(tmp_path, number=0, height=112, width=48)
    with pytest.raises(DataError, match=rf"media '{tall[0].uri}': got 48 x 112 pixels for a video of 48 x 32"):
        engine.generate(with_media(request, tall))
    assert gap(engine.generate(request), model) < ROUNDING


@pytest.mark.parametrize("trains", [[], ["backend.trains=full", "backend.reference_copy=true"]], ids=["lora", "full"])
def test_a_run_makes_videos_from_first_frames_with_ratio_1(
    engine: ExternalLatentEngine,
    model: HunyuanVideo15ImageModel,
    trains: list[str],
    image_folder: Path,
    tmp_path: Path,
) -> None:
    media = [tiny.media(tmp_path, number=number, height=32, width=48) for number in range(2)]
    words = [
        "model=hunyuan-video15-i2v", f"model.path={image_folder}", "model.dtype=float32", "sampling.frames=5",
        "train.micro_batch_size=2", *trains,
    ]  # fmt: skip
    check_edit_run("hunyuan-video15/dance-grpo", words, engine=engine, model=model, media=media, folder=tmp_path)
