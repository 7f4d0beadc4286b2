"""Two experts from a first frame in vLLM-Omni itself, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from external_engines import environments
from external_engines.edits import *
from external_engines.edits import check_edit_run
from external_engines.image_models import (
    started,
    test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them,
)
from external_engines.latents import Ask, asking_from_frames
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan22.config import Wan22I2VConfig
from unirl.models.wan22.i2v import Wan22I2VModel, build
from unirl.numerics.diffusion.wan_miniature import first_frame

__all__ = ["test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them"]

pytestmark = pytest.mark.keyed

PROMPTS = ("a red ring  rolls &amp; stops", "a blue square on the left of two green discs", "")
"""The first is cleaned."""


@pytest.fixture
def model(i2v_folder: Path) -> Wan22I2VModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Wan22I2VConfig(path=str(i2v_folder)), device="cpu")


@pytest.fixture
def ask(model: Wan22I2VModel, tmp_path: Path) -> Ask:
    """First frames of three sizes, most of them of another ratio than the video by a few per cent. Five steps reach both experts."""
    usual = {"height": 32, "width": 48, "frames": 9, "max_sequence_length": 32}
    return asking_from_frames(model, partial(first_frame, tmp_path), prompts=PROMPTS, **usual)


@pytest.fixture
def edit(ask: Ask) -> Ask:
    return ask


@pytest.fixture(scope="module", params=["vllm-omni", "vllm-omni 0.30.0"])
def engine(request: pytest.FixtureRequest, i2v_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started(request.param, build(Wan22I2VConfig(path=str(i2v_folder)), device="cpu")) as result:
        yield result


@pytest.mark.slow
def test_a_run_trains_both_experts_from_first_frames_with_ratio_1(
    i2v_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.make("vllm-omni")
    monkeypatch.chdir(tmp_path)
    media = [first_frame(tmp_path, number=number, height=32, width=48) for number in range(2)]
    words = [
        "engine=vllm-omni", f"model.path={i2v_folder}", "model.dtype=float32", "sampling.frames=5",
        "train.micro_batch_size=2",
    ]  # fmt: skip
    check_edit_run("wan22-i2v/flow-grpo", words, media=media, folder=tmp_path)
