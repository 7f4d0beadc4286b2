"""Videos from a first frame: what is refused, and what trains."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan.model import WanFirstFrame
from wan_models import FROM_FRAME, built, refusals, write
from wan_pipelines import frames_of, initial

Tiny = Callable[[str], Path]
ModelOf = Callable[[str], Any]
each_model = pytest.mark.parametrize("name", FROM_FRAME)


@pytest.fixture
def sampling(frame_sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    return frame_sampling


@pytest.fixture
def model(model_of: ModelOf) -> WanFirstFrame:
    return model_of("wan21-i2v")


def test_another_length_of_prompts_is_refused_beside_image_features(
    tiny: Tiny, model: WanFirstFrame, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    message = r"^sampling\.max_sequence_length: got 48; .*before the last 512 tokens\. Set it to 512\.$"
    (reason,) = refusals("wan21-i2v", tiny("wan21-i2v"), "sampling.max_sequence_length=48")
    assert re.search(message, reason)
    asked = dataclasses.replace(sampling, max_sequence_length=48)
    with pytest.raises(RecipeError, match=message):
        model.encode(frames_of(tmp_path, [0, 1]), sampling=asked)
    write("wan21-i2v", tmp_path / "plain", image_encoder=False)
    assert refusals("wan21-i2v", tmp_path / "plain", "sampling.max_sequence_length=48") == []


@each_model
def test_no_frame_and_two_are_refused(
    model_of: ModelOf, sampling: LatentSamplingConfig, tmp_path: Path, name: str
) -> None:
    model, inputs = model_of(name), frames_of(tmp_path, [0, 1])
    two = dataclasses.replace(inputs, media=((*inputs.media[0], *inputs.media[1]), inputs.media[1]))
    with pytest.raises(DataError, match=r"^prompt 'a ring' \('a ring'\): got no source image, expected one, the first"):
        model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    with pytest.raises(DataError, match=r"^prompt '0' .*: got 2 source images, expected one.*takes no last frame\.$"):
        model.encode(two, sampling=sampling)


@each_model
def test_a_frame_that_would_be_stretched_by_more_than_5_per_cent_is_refused(
    model_of: ModelOf, sampling: LatentSamplingConfig, tmp_path: Path, name: str
) -> None:
    """By either side. Of 64 x 32 pixels, 66 x 32 are off by 3 %, and 68 x 32 by 6 %."""
    model = model_of(name)
    for number, (height, width) in enumerate([(32, 66), (33, 64)]):
        model.encode(frames_of(tmp_path, [3 * number], ["it rolls"], height=height, width=width), sampling=sampling)
    for (height, width), percentage in {(32, 68): 6, (34, 64): 6, (32, 32): 100}.items():
        inputs = frames_of(tmp_path, [0], ["it rolls"], height=height, width=width)
        message = (
            rf"^prompt '0' \('it rolls'\), media '{inputs.media[0][0].uri}': got {width} x {height} pixels for a video of "
            rf"64 x 32, which would stretch it by {percentage}%, expected at most 5%\. Crop it beforehand, or change"
        )
        with pytest.raises(DataError, match=message):
            model.encode(inputs, sampling=sampling)


def test_a_frame_count_off_the_grid_is_refused_before_the_vae_refuses_it(
    model: WanFirstFrame, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    asked = dataclasses.replace(sampling, frames=8)
    with pytest.raises(RecipeError, match=r"^sampling\.frames: got 8, .*Nearest: 5 or 9\."):
        model.encode(frames_of(tmp_path, [0, 1]), sampling=asked)


@each_model
def test_every_parameter_of_the_transformers_trains_and_nothing_else(
    tiny: Tiny, sampling: LatentSamplingConfig, tmp_path: Path, name: str
) -> None:
    """Two rows, one for each of two experts."""
    fresh = built(name, tiny(name))
    conditions = fresh.encode(frames_of(tmp_path, [0, 1]), sampling=sampling)
    x = initial(fresh, sampling)
    fresh.velocity(x, torch.tensor([0.9, 0.2]), conditions).square().mean().backward()
    assert not [name for name, p in fresh.trainable.named_parameters() if p.grad is None or not p.grad.any()]
    others = [fresh.pipeline.components.get(part) for part in ("text_encoder", "image_encoder", "vae")]
    assert not any(p.requires_grad for part in others if part is not None for p in part.parameters())


def test_a_process_without_the_vae_says_who_must_ask_for_it(
    tiny: Tiny, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    model = built("wan21-i2v", tiny("wan21-i2v"), serves=frozenset({"encode"}))
    with pytest.raises(RunFailed, match=r"got a call of `decode`, .* without the VAE"):
        model.encode(frames_of(tmp_path, [0, 1]), sampling=sampling)


def test_a_process_that_encodes_nothing_holds_no_encoder(tiny: Tiny) -> None:
    model = built("wan21-i2v", tiny("wan21-i2v"), serves=frozenset())
    for part in ("text_encoder", "image_encoder", "vae"):
        assert {p.device.type for p in model.pipeline.components[part].parameters()} == {"meta"}
