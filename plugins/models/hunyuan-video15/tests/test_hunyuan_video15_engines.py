"""HunyuanVideo 1.5 in vLLM-Omni itself, on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import Ask, asking
from unirl.core.specs.facts import names_in
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.hunyuan_video15.config import HunyuanVideo15Config
from unirl.models.hunyuan_video15.model import HunyuanVideo15Model, build

pytestmark = pytest.mark.slow

PROMPTS = ('a sign that says "STOP" beside a red ring', "a blue square on the left of two green discs", "")
"""Prompts of different lengths, one with quoted words; the first two are longer than their conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> HunyuanVideo15Model:
    """The trained module with the weights of the checkpoint, to be modified by tests. Its spec names its layers."""
    model: Any = build(HunyuanVideo15Config(path=str(tiny_folder)), device="cpu")
    model.spec = dataclasses.replace(model.spec, lora_targets=names_in(model.spec.lora_targets, model.trainable))
    return model


@pytest.fixture
def ask(model: HunyuanVideo15Model) -> Ask:
    return asking(model, prompts=PROMPTS, height=32, width=48, frames=5, max_sequence_length=32)


@pytest.fixture(scope="module", params=["vllm-omni 0.30.0"])
def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started(request.param, build(HunyuanVideo15Config(path=str(tiny_folder)), device="cpu")) as result:
        yield result
