from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import HunyuanVideoPipeline
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video import tiny
from unirl.models.hunyuan_video.config import HunyuanVideoConfig
from unirl.models.hunyuan_video.model import HunyuanVideoModel, build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hunyuan-video") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> HunyuanVideoModel:
    return build(HunyuanVideoConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def on_the_same_weights() -> Callable[[HunyuanVideoModel], Any]:
    """diffusers' pipeline on a model's own components.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a separate test, and conformance compares with a pipeline that was loaded apart from the model.
    """

    def made(model: HunyuanVideoModel) -> Any:
        result = HunyuanVideoPipeline(**model.pipeline.components)
        result.set_progress_bar_config(disable=True)
        return result

    return made


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
