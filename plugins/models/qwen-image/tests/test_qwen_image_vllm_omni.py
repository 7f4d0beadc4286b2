"""Qwen-Image in vLLM-Omni itself, on a CPU, beside the module that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosted_engines import environments
from hosted_engines.latents import ROUNDING, adapter, assert_same, gap, trainside
from unirl.conformance.workbench.requests import make_request
from unirl.conformance.workbench.trained import full_update, perturb, with_adapter
from unirl.core.config import LatentSamplingConfig, SdeStepsConfig
from unirl.core.errors import EchoMismatch
from unirl.core.request import Request
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_engine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.runtime.engine_host.latent_engine import HostedLatentEngine

Ask = Callable[..., Request]
PROMPTS = ("a red ring", "a blue square on the left of two green discs, and behind them all a dog", "")
"""Of different lengths, so that a batch has rows that are masked; the second is longer than its conditions."""


@pytest.fixture
def own(tiny_folder: Path) -> QwenImageModel:
    """What trains, to be changed."""
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def engine(model: QwenImageModel) -> Iterator[HostedLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    environments.make("vllm-omni")
    engine = build_engine(VllmOmniConfig(max_num_seqs=4), model=model, device="cpu")
    yield engine
    engine.close()


def ask(engine: HostedLatentEngine, model: QwenImageModel, **settings: Any) -> Request:
    sampling = LatentSamplingConfig(
        **{
            **{"steps": 5, "height": 32, "width": 48, "max_sequence_length": 32},
            **{"kernel": "flow-sde", "sde": SdeStepsConfig(mode="random", count=2), **settings},
        }
    )
    return make_request(
        model, {"image": sampling}, prompts=PROMPTS, samples_per_prompt=2, policy_version=engine.version
    )


@pytest.mark.parametrize("mode", ["none", "norm-corrected", "two-pass", "batched"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: HostedLatentEngine, own: QwenImageModel, mode: str
) -> None:
    """Of the same noise, in every mode of guidance, with prompts of different lengths in a batch. Ten forwards at most
    of fp32 arithmetic in another order are 1e-6 off, in latents of order 1 and log-probs of their mean."""
    engine.load_weights(full_update(own, version=1))
    guided: dict[str, Any] = {"guidance_mode": mode, "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}
    request = ask(engine, own, **({} if mode == "none" else guided))
    found = engine.generate(request).tracks["image"]
    assert gap(found, own) < ROUNDING
    assert_same(found, trainside(own, request))


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: HostedLatentEngine, own: QwenImageModel) -> None:
    request = ask(engine, own)
    whole = engine.generate(request).tracks["image"]
    assert max(engine.batches) == 4
    assert_same(engine.generate(request.select([4])).tracks["image"], whole.select([4]))


def test_full_weights_and_adapters_are_sampled_from_in_turns(engine: HostedLatentEngine, own: QwenImageModel) -> None:
    """Among the adapted layers are those that vLLM-Omni fuses, and one that has another name there."""
    engine.load_weights(full_update(own, version=1))
    perturb(own, seed=1)
    stale = engine.generate(ask(engine, own)).tracks["image"]
    assert gap(stale, own) > 1e-3, "the check does not see weights of an older version"
    engine.load_weights(full_update(own, version=2))
    assert gap(engine.generate(ask(engine, own)).tracks["image"], own) < ROUNDING
    for version, targets in ((3, own.spec.lora_targets), (4, ("attn.to_out.0", "attn.add_k_proj"))):
        update, added = adapter(own, targets=targets, version=version)
        engine.load_weights(update)
        found = engine.generate(ask(engine, own)).tracks["image"]
        assert found.policy_version == (version,) * 6
        assert gap(found, own) > 1e-3, "the check does not see an adapter"
        assert gap(found, with_adapter(copy.deepcopy(own), added)) < ROUNDING
    perturb(own, seed=2)
    engine.load_weights(full_update(own, version=5))
    assert gap(engine.generate(ask(engine, own)).tracks["image"], own) < ROUNDING


def test_an_adapter_that_it_would_put_beside_what_it_computes_with_is_refused(
    engine: HostedLatentEngine, own: QwenImageModel
) -> None:
    engine.load_weights(full_update(own, version=1))
    update, _ = adapter(own, targets=("img_in",), version=2)
    with pytest.raises(EchoMismatch, match=r"an adapter of 'img_in' were sent; .* backend\.targets"):
        engine.load_weights(update)
    assert gap(engine.generate(ask(engine, own)).tracks["image"], own) < ROUNDING
