"""Scripts beside these tests are imported by them, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import WanPipeline
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan22 import i2v, tiny
from unirl.models.wan22.config import Wan22Config, Wan22I2VConfig
from unirl.models.wan22.i2v import Wan22I2VModel
from unirl.models.wan22.model import Wan22Model, build

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("wan22_experts")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan22") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> Wan22Model:
    return build(Wan22Config(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def i2v_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan22-i2v") / "tiny"
    tiny.write_i2v(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def i2v_model(i2v_folder: Path) -> Wan22I2VModel:
    return i2v.build(Wan22I2VConfig(path=str(i2v_folder)), device="cpu")


@pytest.fixture(scope="session")
def on_the_same_weights() -> Callable[[Wan22Model], WanPipeline]:
    """diffusers' pipeline on a model's own components, with Euler steps of the published shift.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a test of its own, and conformance compares with a pipeline that was loaded apart from the model.
    """

    def made(model: Wan22Model) -> WanPipeline:
        result = WanPipeline(
            **{**model.pipeline.components, "scheduler": EulerScheduler(shift=3.0)}, boundary_ratio=0.875
        )
        result.set_progress_bar_config(disable=True)
        return result

    return made


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )
