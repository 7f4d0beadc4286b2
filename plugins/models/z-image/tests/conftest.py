from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import ZImagePipeline
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.z_image import tiny
from unirl.models.z_image.config import ZImageConfig
from unirl.models.z_image.model import ZImageModel, build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As the published checkpoint is called: engines may know it by name.
    folder = tmp_path_factory.mktemp("tiny") / "Z-Image"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> ZImageModel:
    return build(ZImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def pipeline(model: ZImageModel) -> ZImagePipeline:
    """diffusers' pipeline on the model's own components: a convolution's last bit depends on where its weights lie in
    memory. Conformance compares with a pipeline that was loaded apart from the model."""
    result = ZImagePipeline(**model.pipeline.components)
    result.set_progress_bar_config(disable=True)
    return result


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Oblong, so that height and width cannot be taken for each other."""
    return LatentSamplingConfig(
        num_inference_steps=4,
        height=32,
        width=48,
        max_sequence_length=96,
        kernel="euler",
        eta=0.0,
        guidance_mode="two-pass",
    )
