from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import WanPipeline
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan21 import tiny
from unirl.models.wan21.config import Wan21Config
from unirl.models.wan21.model import Wan21Model, build
from unirl.models.wan21.parity import EulerScheduler


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan21") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> Wan21Model:
    return build(Wan21Config(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def on_the_same_weights() -> Callable[[Wan21Model], WanPipeline]:
    """diffusers' pipeline on a model's own components, with Euler steps of the published shift.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a test of its own, and conformance compares with a pipeline that was loaded apart from the model.
    """

    def made(model: Wan21Model) -> WanPipeline:
        result = WanPipeline(**{**model.pipeline.components, "scheduler": EulerScheduler(shift=3.0)})
        result.set_progress_bar_config(disable=True)
        return result

    return made


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
