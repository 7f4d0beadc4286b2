from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from miniatures import folder_of, on_its_components
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video15 import image, model, tiny
from unirl.models.hunyuan_video15.config import HunyuanVideo15Config, HunyuanVideo15ImageConfig
from unirl.models.hunyuan_video15.image import HunyuanVideo15ImageModel
from unirl.models.hunyuan_video15.model import HunyuanVideo15Model

tiny_folder = folder_of("hunyuan-video15", tiny.write)
image_folder = folder_of("hunyuan-video15-image", tiny.write_image)


@pytest.fixture(scope="session")
def of_text(tiny_folder: Path) -> HunyuanVideo15Model:
    return model.build(HunyuanVideo15Config(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def of_image(image_folder: Path) -> HunyuanVideo15ImageModel:
    return image.build(HunyuanVideo15ImageConfig(path=str(image_folder)), device="cpu")


@pytest.fixture(scope="session")
def on_the_same_weights() -> Callable[[HunyuanVideo15Model], Any]:
    """diffusers' pipeline on a model's own components."""

    def made(model: HunyuanVideo15Model) -> Any:
        takes_images = isinstance(model, HunyuanVideo15ImageModel)
        kind = HunyuanVideo15ImageToVideoPipeline if takes_images else HunyuanVideo15Pipeline
        return on_its_components(kind, model)

    return made


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
