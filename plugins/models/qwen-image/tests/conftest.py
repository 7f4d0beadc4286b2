from __future__ import annotations

from collections.abc import Iterator

import pytest
from diffusers import QwenImagePipeline
from miniatures import folder_of, model_of, pipeline_of
from qwen_image_editors import AREAS, Editor, editor_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.qwen_image import tiny
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import build
from unirl.models.qwen_image.parity import scaling_sources

tiny_folder = folder_of("qwen-image", tiny.write)
model = model_of(build, QwenImageConfig)
pipeline = pipeline_of(QwenImagePipeline)


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Oblong, so that height and width cannot be taken for each other."""
    return LatentSamplingConfig(
        num_inference_steps=4,
        height=32,
        width=48,
        max_sequence_length=48,
        kernel="euler",
        eta=0.0,
        guidance_mode="norm-corrected",
    )


@pytest.fixture(scope="session", params=["edit", "edit-plus"])
def editor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Editor:
    return editor_of(request.param, tmp_path_factory.mktemp("qwen-image-edit") / request.param)


@pytest.fixture(scope="session")
def plus(tmp_path_factory: pytest.TempPathFactory) -> Editor:
    return editor_of("edit-plus", tmp_path_factory.mktemp("qwen-image-edit") / "plus")


@pytest.fixture
def small_areas() -> Iterator[None]:
    """The pipelines scale sources to `AREAS`."""
    with scaling_sources(**AREAS):
        yield
