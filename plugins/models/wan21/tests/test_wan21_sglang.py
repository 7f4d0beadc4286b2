"""Wan 2.1 from text in SGLang itself, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, asking, assert_same, gap, trainside
from unirl.conformance.doubles.trained import full_update
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan21.config import Wan21Config
from unirl.models.wan21.model import Wan21Model, build

PROMPTS = ("a red ring  rolls &amp; stops", "a blue square on the left of two green discs", "")
"""The first is cleaned, the second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> Wan21Model:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Wan21Config(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: Wan21Model) -> Ask:
    return asking(model, prompts=PROMPTS, frames=9, height=32, width=48, max_sequence_length=32)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started("sglang", build(Wan21Config(path=str(tiny_folder)), device="cpu")) as result:
        yield result


@pytest.mark.parametrize("frames", [1, 5])
def test_videos_of_other_lengths_are_those_of_the_trainer(
    engine: ExternalLatentEngine, model: Wan21Model, ask: Ask, frames: int
) -> None:
    """One of one frame is an image."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, frames=frames, max_sequence_length=512)
    result = engine.generate(request)
    assert result.media is not None
    assert result.media.stacked.shape[1:] == ((3, 32, 48) if frames == 1 else (5, 3, 32, 48))
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))
