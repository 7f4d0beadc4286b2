"""Wan 2.1 from a first frame in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from external_engines.edits import *
from external_engines.edits import with_media
from external_engines.first_frames import *
from external_engines.first_frames import FRAME_PROMPTS, check_frame_run
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, asking_from_frames, assert_same, gap, trainside
from unirl.conformance.doubles.trained import full_update
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan21 import tiny
from unirl.models.wan21.config import Wan21I2VConfig
from unirl.models.wan21.i2v import Wan21I2VModel, build
from unirl.numerics.diffusion.wan_miniature import first_frame


def test_a_second_frame_another_ratio_and_a_length_that_hides_features_are_refused_by_name(
    engine: ExternalLatentEngine, model: Wan21I2VModel, ask: Ask, tmp_path: Path
) -> None:
    """And the engine goes on."""
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


@pytest.mark.parametrize("name", ["sglang", "vllm-omni"])
def test_a_checkpoint_without_an_image_encoder_takes_prompts_of_any_length(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny.write_i2v(folder, seed=0, image_encoder=False)
    model = build(Wan21I2VConfig(path=str(folder)), device="cpu")
    usual = {"height": 32, "width": 48, "frames": 5}
    ask = asking_from_frames(model, partial(first_frame, tmp_path), prompts=FRAME_PROMPTS[:1], **usual)
    with started(name, model) as engine:
        request = ask(engine, max_sequence_length=48)
        result = engine.generate(request)
        assert set(result.conditions["positive"].values) == {"prompt_embeds", "source"}
        assert gap(result, model) < ROUNDING
        assert_same(result, trainside(model, request))


def test_an_image_encoder_whose_features_sglang_would_take_for_text_is_refused(model: Wan21I2VModel) -> None:
    """Patches of 4 x 4 pixels in 32 x 32 are 64 features, and one is of the whole image."""
    model.pipeline.image_encoder.config.patch_size = 4
    with (
        pytest.raises(RecipeError, match=r"^engine: .* makes 65 features .* first 257 tokens"),
        started("sglang", model),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("trains", [[], ["backend.trains=full", "backend.reference_copy=true"]], ids=["lora", "full"])
def test_a_run_makes_videos_from_first_frames_with_ratio_1(
    engine: ExternalLatentEngine, model: Wan21I2VModel, trains: list[str], i2v_folder: Path, tmp_path: Path
) -> None:
    check_frame_run(
        "wan21-i2v",
        ["sampling.max_sequence_length=512", *trains],
        engine=engine,
        model=model,
        checkpoint=i2v_folder,
        folder=tmp_path,
    )
