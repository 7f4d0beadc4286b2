"""Wan 2.1 from a first frame in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from external_engines.edits import *
from external_engines.edits import with_media
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, asking_from_frames, assert_same, gap, trainside
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan.model import WanFirstFrame
from unirl.models.wan.tiny import first_frame
from wan_engines import *
from wan_engines import PROMPTS, check_frame_run
from wan_models import built, write

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def name() -> str:
    return "wan21-i2v"


def test_a_second_frame_another_ratio_and_a_length_that_hides_features_are_refused_by_name(
    engine: ExternalLatentEngine, model: WanFirstFrame, ask: Ask, tmp_path: Path
) -> None:
    """And the engine continues."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine).select([0])
    (media,) = request.inputs.media
    with pytest.raises(DataError, match="got 2 media of role 'source', of which it needs one"):
        engine.generate(with_media(request, (*media, *media)))
    square = first_frame(tmp_path, number=0, height=48, width=48)
    with pytest.raises(
        DataError,
        match=rf"media '{square[0].uri}': got 48 x 48 pixels for a video of 48 x 32, which would stretch it by 50%",
    ):
        engine.generate(with_media(request, square))
    sampling = dataclasses.replace(request.latent.sampling, max_sequence_length=48)
    shorter = dataclasses.replace(request, params=dataclasses.replace(request.latent, sampling=sampling))
    with pytest.raises(RunFailed, match=r"sampling\.max_sequence_length: got 48; this checkpoint reads features"):
        engine.generate(shorter)
    assert gap(engine.generate(request), model) < ROUNDING


@pytest.mark.parametrize("engine_name", ["sglang", "vllm-omni"])
def test_a_checkpoint_without_an_image_encoder_takes_prompts_of_any_length(engine_name: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write("wan21-i2v", folder, image_encoder=False)
    model = built("wan21-i2v", folder)
    usual = {"height": 32, "width": 48, "frames": 5}
    ask = asking_from_frames(model, partial(first_frame, tmp_path), prompts=PROMPTS[:1], **usual)
    with started(engine_name, model) as engine:
        request = ask(engine, max_sequence_length=48)
        result = engine.generate(request)
        assert set(result.conditions["positive"].values) == {"prompt_embeds", "source"}
        assert gap(result, model) < ROUNDING
        assert_same(result, trainside(model, request))


def test_an_image_encoder_whose_features_sglang_would_take_for_text_is_refused(model: WanFirstFrame) -> None:
    """Patches of 4 x 4 pixels in 32 x 32 are 64 features, and one is of the whole image."""
    model.pipeline.image_encoder.config.patch_size = 4
    with (
        pytest.raises(RecipeError, match=r"^engine: .* makes 65 features .* first 257 tokens"),
        started("sglang", model),
    ):
        pass


@pytest.mark.parametrize("trains", [[], ["backend.trains=full", "backend.reference_copy=true"]], ids=["lora", "full"])
def test_a_run_makes_videos_from_first_frames_with_ratio_1(
    engine: ExternalLatentEngine,
    model: WanFirstFrame,
    trains: list[str],
    tiny: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    words = ["sampling.max_sequence_length=512", *trains]
    check_frame_run(words, engine=engine, model=model, checkpoint=tiny("wan21-i2v"), folder=tmp_path)
