from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusers import QwenImagePipeline
from qwen_image_editors import AREAS, Editor, editor_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.qwen_image import tiny
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.models.qwen_image.parity import scaling_sources


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-image") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> QwenImageModel:
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def pipeline(model: QwenImageModel) -> QwenImagePipeline:
    """diffusers' pipeline on the model's own components.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a separate test, and conformance compares with a pipeline that was loaded apart from the model.
    """
    result = QwenImagePipeline(**model.pipeline.components)
    result.set_progress_bar_config(disable=True)
    return result


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
