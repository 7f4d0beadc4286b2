"""HunyuanImage-3.0's images from vLLM-Omni, on a CPU and in fp32, against those of the trained module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.environments import make
from external_engines.latents import ROUNDING, adapter, assert_same, gap, trainside
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import EchoMismatch
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_engine
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ("a red ring", "two blue squares on the left", "it")
GUIDED: dict[str, Any] = {"guidance_scale": 5.0, "guidance_mode": "two-pass"}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    make("vllm-omni")
    own = build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(VllmOmniConfig(max_num_seqs=4), model=own, device="cpu")
    yield engine
    engine.close()


@pytest.fixture
def moving(model: HunyuanImageModel) -> HunyuanImageModel:
    """A copy of the trained model, to change."""
    return copy.deepcopy(model)


def asked(
    model: HunyuanImageModel, engine: ExternalLatentEngine, *, media: Any = lambda number: (), **settings: Any
) -> Request:
    """Two samples for each prompt, four steps of which two are stochastic."""
    usual = {"num_inference_steps": 4, "height": 64, "width": 48, "sde": SdeStepsConfig(mode="random", count=2)}
    return make_request(
        model,
        LatentSamplingConfig(**{**usual, **settings}),
        track="image",
        prompts=PROMPTS,
        media=media,
        samples_per_prompt=2,
        policy_version=engine.version,
    )


def check(engine: ExternalLatentEngine, model: HunyuanImageModel, request: Request) -> None:
    track = engine.generate(request)
    assert_same(track, trainside(model, request))
    assert gap(track, model) < ROUNDING


def test_the_checkpoint_is_read_as_it_is(engine: ExternalLatentEngine, model: HunyuanImageModel) -> None:
    """Prompts of different lengths in one batch, without guidance and with it."""
    for settings in ({}, GUIDED, {**GUIDED, "negative_prompt": "blurred"}):
        check(engine, model, asked(model, engine, **settings))
    assert max(engine.batches) == 4
