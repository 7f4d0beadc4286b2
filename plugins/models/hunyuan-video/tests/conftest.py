from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from diffusers import HunyuanVideoPipeline
from miniatures import folder_of, model_of, on_its_components
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video import tiny
from unirl.models.hunyuan_video.config import HunyuanVideoConfig
from unirl.models.hunyuan_video.model import HunyuanVideoModel, build

tiny_folder = folder_of("hunyuan-video", tiny.write)
model = model_of(build, HunyuanVideoConfig)


@pytest.fixture(scope="session")
def on_the_same_weights() -> Callable[[HunyuanVideoModel], Any]:
    """diffusers' pipeline on a model's own components."""
    return partial(on_its_components, HunyuanVideoPipeline)


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
