"""vLLM-Omni with every layer split over two ranks, joined by gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.latents import ROUNDING, Ask, adapter, gap
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[ExternalLatentEngine]:
    make("vllm-omni")
    config = VllmOmniConfig(max_num_seqs=4, tensor_parallel=2, sleep_mode=True)
    engine = build(config, model=build_model(Sd3Config(path=str(folder)), device="cpu"), device="cpu")
    yield engine
    engine.close()


def test_two_ranks_sample_from_weights_and_adapters_that_they_hold_by_halves(
    split: ExternalLatentEngine, model: Sd3Model, ask: Ask
) -> None:
    guided = {"guidance_scale": 3.5, "negative_prompt": "blurred"}
    perturb(model, seed=1)
    split.load_weights(full_update(model, version=1))
    for settings in ({}, guided):
        assert gap(split.generate(ask(split, **settings)), model) < ROUNDING
    # B of the first is split over the ranks, and A of the second.
    update, added = adapter(model, targets=("attn.to_q", "attn.to_out.0"), version=2)
    split.load_weights(update)
    made = split.generate(ask(split, **guided))
    assert gap(made, with_adapter(copy.deepcopy(model), added)) < ROUNDING < gap(made, model)
    split.sleep()
    split.wake()
    split.load_weights(full_update(model, version=3))
    assert gap(split.generate(ask(split)), model) < ROUNDING
