"""BAGEL's texts from vLLM-Omni, on a CPU and in fp32, against those of the trained module: from the same process, and with
the same weights, as its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import started
from external_engines.sequence_texts import *
from external_engines.sequence_texts import asking
from external_engines.text_engines import check_deaths
from external_engines.texts import Ask
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Texts four at a time; its weights are those that the test before left."""
    with started("vllm-omni", build(BagelConfig(path=str(tiny_folder)), device="cpu"), max_num_texts=4) as result:
        yield result


@pytest.fixture
def model(tiny_folder: Path) -> BagelModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(BagelConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def ask(tiny_folder: Path) -> Ask:
    return asking(build(BagelConfig(path=str(tiny_folder)), device="cpu"))


@pytest.fixture
def variants() -> list[dict[str, Any]]:
    """With the latents of images and without."""
    return [{}, {"options": {"sources": "features"}}]


@pytest.fixture
def spoiled() -> tuple[str, str]:
    return "language_model.model.layers.1.mlp.down_proj.weight", r"layers\.1\.mlp\.down_proj"


def test_an_engine_that_dies_is_reported_and_started_again(engine: Any, model: BagelModel, ask: Ask) -> None:
    """In a sync, and while it writes. Last, for it ends the engine."""
    check_deaths(engine, model, ask)
