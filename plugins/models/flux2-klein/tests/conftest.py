from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import Flux2KleinPipeline
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.flux2_klein import tiny
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import Flux2KleinModel, build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux2-klein") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> Flux2KleinModel:
    return build(Flux2KleinConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def pipeline(model: Flux2KleinModel) -> Flux2KleinPipeline:
    """diffusers' pipeline on the model's own components: a convolution's last bit depends on where its weights lie in
    memory. Conformance compares with a pipeline that was loaded apart from the model."""
    result = Flux2KleinPipeline(**model.pipeline.components)
    result.set_progress_bar_config(disable=True)
    return result


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Oblong, so that height and width cannot be taken for each other."""
    return LatentSamplingConfig(
        num_inference_steps=4,
        height=32,
        width=48,
        max_sequence_length=64,
        kernel="euler",
        eta=0.0,
        guidance_mode="two-pass",
    )
