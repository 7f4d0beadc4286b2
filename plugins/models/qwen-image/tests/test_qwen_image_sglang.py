"""Qwen-Image in SGLang itself, on a CPU, beside the module that trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosted_engines import environments
from hosted_engines.latents import ROUNDING, adapter, assert_same, gap, trainside
from unirl.conformance.workbench.requests import make_request
from unirl.conformance.workbench.trained import full_update, perturb, with_adapter
from unirl.core.config import LatentSamplingConfig, SdeStepsConfig
from unirl.core.errors import RunFailed
from unirl.core.request import Request
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build as build_engine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.runtime.engine_host.latent_engine import HostedLatentEngine

PROMPTS = ("a red ring", "a blue square on the left of two green discs, and behind them all a dog", "")
"""Of different lengths; the second is longer than its conditions."""


@pytest.fixture
def own(tiny_folder: Path) -> QwenImageModel:
    """What trains, to be changed."""
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def engine(model: QwenImageModel) -> Iterator[HostedLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    environments.make("sglang")
    engine = build_engine(SglangConfig(max_num_seqs=4), model=model, device="cpu")
    yield engine
    engine.close()


def ask(engine: HostedLatentEngine, model: QwenImageModel, **settings: Any) -> Request:
    """Two samples of each prompt, oblong."""
    own = {"steps": 5, "height": 32, "width": 48, "max_sequence_length": 32, "kernel": "flow-sde"}
    sampling = LatentSamplingConfig(**{**own, "sde": SdeStepsConfig(mode="random", count=2), **settings})
    return make_request(
        model, {"image": sampling}, prompts=PROMPTS, samples_per_prompt=2, policy_version=engine.version
    )


@pytest.mark.parametrize("mode", ["", "norm-corrected", "two-pass", "batched"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: HostedLatentEngine, own: QwenImageModel, mode: str
) -> None:
    """Of the same noise, without guidance and in every mode of it, with a negative prompt of another length."""
    engine.load_weights(full_update(own, version=1))
    guided: dict[str, Any] = {"guidance_mode": mode, "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}
    request = ask(engine, own, **(guided if mode else {}))
    found = engine.generate(request).tracks["image"]
    assert gap(found, own) < ROUNDING
    assert_same(found, trainside(own, request))


def test_full_weights_and_adapters_are_sampled_from_in_turns(engine: HostedLatentEngine, own: QwenImageModel) -> None:
    """Among the adapted layers are the three that are one in SGLang: all of them, and one alone."""
    engine.load_weights(full_update(own, version=1))
    perturb(own, seed=1)
    stale = engine.generate(ask(engine, own)).tracks["image"]
    assert gap(stale, own) > 1e-3, "the check does not see weights of an older version"
    engine.load_weights(full_update(own, version=2))
    assert gap(engine.generate(ask(engine, own)).tracks["image"], own) < ROUNDING
    for version, targets in ((3, own.spec.lora_targets), (4, ("attn.to_out.0", "attn.add_k_proj")), (5, ("img_in",))):
        update, added = adapter(own, targets=targets, version=version)
        engine.load_weights(update)
        found = engine.generate(ask(engine, own)).tracks["image"]
        assert found.policy_version == (version,) * 6
        assert gap(found, own) > 1e-3, "the check does not see an adapter"
        assert gap(found, with_adapter(copy.deepcopy(own), added)) < ROUNDING
    perturb(own, seed=2)
    engine.load_weights(full_update(own, version=6))
    assert gap(engine.generate(ask(engine, own)).tracks["image"], own) < ROUNDING


def test_conditions_that_the_model_does_not_have_are_refused(engine: HostedLatentEngine, own: QwenImageModel) -> None:
    with pytest.raises(RunFailed, match="max_sequence_length: 1025 was asked for; qwen-image takes 1 to 1024"):
        engine.generate(ask(engine, own, max_sequence_length=1025))
