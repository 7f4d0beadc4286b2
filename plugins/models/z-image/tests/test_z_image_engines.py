"""Z-Image in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.image_models import *
from external_engines.image_models import ENGINES, started
from external_engines.latents import Ask, asking
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.z_image.config import ZImageConfig
from unirl.models.z_image.model import ZImageModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ("a red ring", "a blue square on the left of two green discs", "")
"""The second is longer than its conditions; the others end in another multiple of 32 tokens."""


@pytest.fixture
def model(tiny_folder: Path) -> ZImageModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(ZImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: ZImageModel) -> Ask:
    return asking(model, prompts=PROMPTS, height=32, width=48, max_sequence_length=96)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started(request.param, build(ZImageConfig(path=str(tiny_folder)), device="cpu")) as result:
        yield result
