"""BAGEL's images from vLLM-Omni, on a CPU and in fp32, against those of the trained module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import started
from external_engines.sequence_models import *
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started("vllm-omni", build(BagelConfig(path=str(tiny_folder)), device="cpu")) as result:
        yield result


@pytest.fixture
def guidances() -> list[dict[str, Any]]:
    """By text, and by text and sources."""
    three_branches = {
        "guidance_scale": 4.0,
        "guidance_mode": "text-image",
        "guidance_options": {"image_scale": 1.5, "low": 0.4, "renorm": "global"},
    }
    return [{"guidance_scale": 3.0}, three_branches]
