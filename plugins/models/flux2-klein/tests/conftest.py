from __future__ import annotations

import pytest
from diffusers import Flux2KleinPipeline
from miniatures import folder_of, model_of, pipeline_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.flux2_klein import tiny
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import build

tiny_folder = folder_of("flux2-klein", tiny.write)
model = model_of(build, Flux2KleinConfig)
pipeline = pipeline_of(Flux2KleinPipeline)


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
