from __future__ import annotations

import pytest
from diffusers import ZImagePipeline
from miniatures import folder_of, model_of, pipeline_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.z_image import tiny
from unirl.models.z_image.config import ZImageConfig
from unirl.models.z_image.model import build

# As the published checkpoint is called: engines may know it by name.
tiny_folder = folder_of("Z-Image", tiny.write)
model = model_of(build, ZImageConfig)
pipeline = pipeline_of(ZImagePipeline)


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
