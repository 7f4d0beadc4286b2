"""vLLM-Omni with batches that rows join and leave between steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.environments import make
from external_engines.latents import ROUNDING, Ask, adapter, assert_same, gap, trainside
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.types.request import Request
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Track
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build
from unirl.engines.vllm_omni.environment import ENVIRONMENT, PRODUCT
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stepwise(folder: Path) -> Iterator[ExternalLatentEngine]:
    """Four rows a step at most; its server takes two rollouts at once."""
    make("vllm-omni")
    watched = dataclasses.replace(
        ENVIRONMENT, serve="watched_server:calls", modules=(*ENVIRONMENT.modules, "watched_server")
    )
    model = build_model(Sd3Config(path=str(folder)), device="cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parent))
        patched.setattr("unirl.engines.vllm_omni.engine.PRODUCT", dataclasses.replace(PRODUCT, environment=watched))
        engine = build(VllmOmniConfig(max_num_seqs=4, step_batching=True), model=model, device="cpu")
    yield engine
    engine.close()


def together(engine: ExternalLatentEngine, requests: dict[str, Request]) -> tuple[list[list[int]], dict[str, Track]]:
    """Tracks of requests that are on their way at once, and the steps of the rows of each batch."""
    process: Any = engine._process
    sent = {name: torch.frombuffer(bytearray(to_bytes(one)), dtype=torch.uint8) for name, one in requests.items()}
    batches, result = process.call("together", tensors=sent, timeout_s=60)
    return batches, {name: from_bytes(data.numpy().tobytes(), Track) for name, data in result.items()}


GUIDED: dict[str, Any] = {"guidance_scale": 3.5, "negative_prompt": "blurred"}
TWO_SCALES = {"guidance_mode": "two-scale", "guidance_options": {"scale_low": 1.5, "boundary": 0.8}}


@pytest.mark.parametrize("guidance", [{}, GUIDED, GUIDED | TWO_SCALES], ids=["none", "on", "two scales"])
def test_rows_of_two_schedules_share_their_batches_and_are_what_each_is_by_itself(
    stepwise: ExternalLatentEngine, model: Sd3Model, ask: Ask, guidance: dict[str, Any]
) -> None:
    stepwise.load_weights(full_update(model, version=1))
    requests = {
        "first": ask(stepwise, num_inference_steps=5, keeps_all=True, **guidance),
        "second": ask(stepwise, num_inference_steps=3, kernel="dance-sde", eta=0.3, **guidance),
    }
    batches, tracks = together(stepwise, requests)
    assert sorted(step for batch in batches for step in batch) == sorted([*range(5), *range(3)] * 6)
    assert max(len(batch) for batch in batches) == 4
    assert any(len(set(batch)) > 1 for batch in batches), "no row joined a batch that was on its way"
    for name, request in requests.items():
        assert gap(tracks[name], model) < ROUNDING
        assert_same(tracks[name], trainside(model, request))


def test_it_samples_from_what_was_sent_last(stepwise: ExternalLatentEngine, model: Sd3Model, ask: Ask) -> None:
    perturb(model, seed=1)
    stepwise.load_weights(full_update(model, version=2))
    result = stepwise.generate(ask(stepwise))
    assert max(stepwise.batches) == 4
    assert gap(result, model) < ROUNDING
    update, added = adapter(model, targets=model.spec.lora_targets, version=3)
    stepwise.load_weights(update)
    result = stepwise.generate(ask(stepwise))
    assert result.policy_version == (3,) * 6
    assert gap(result, with_adapter(copy.deepcopy(model), added)) < ROUNDING
