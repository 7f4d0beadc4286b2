from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from miniatures import folder_of, model_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model, build
from unirl.quickstart import checkpoint_path

tiny_folder = folder_of("sd3", tiny.write)
tiny_model = model_of(build, Sd3Config)


@pytest.fixture(scope="session", params=["random", "quickstart"])
def checkpoint(request: pytest.FixtureRequest, tiny_folder: Path) -> Path:
    """The checkpoints that must agree with diffusers: one with random weights, one that was trained."""
    return tiny_folder if request.param == "random" else checkpoint_path()


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Sd3Model:
    return build(Sd3Config(path=str(checkpoint)), device="cpu")


@pytest.fixture
def load_reference() -> Callable[..., StableDiffusion3Pipeline]:
    """The pipeline as a user of diffusers loads it, apart from the model under test."""

    def load(folder: Path, **components: None) -> StableDiffusion3Pipeline:
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return load


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    return LatentSamplingConfig(
        num_inference_steps=4, height=64, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
