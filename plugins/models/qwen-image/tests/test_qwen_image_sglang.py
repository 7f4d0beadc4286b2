"""Qwen-Image in SGLang itself, on a CPU: what every engine for latents is tried for, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosted_engines import environments
from hosted_engines.latent_engines import (
    test_after_a_full_sync_it_samples_from_what_was_sent,
    # The second of its adapters is on one of three layers that are one in SGLang.
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_what_was_asked_for_comes_back,
)
from hosted_engines.latents import ROUNDING, Ask, asking, assert_same, gap, trainside
from unirl.conformance.workbench.trained import full_update
from unirl.core.errors import RunFailed
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build as build_engine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.runtime.engine_host.latent_engine import HostedLatentEngine

__all__ = [
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_what_was_asked_for_comes_back",
]

PROMPTS = ("a red ring", "a blue square on the left of two green discs, and behind them all a dog", "")
"""Of different lengths; the second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> QwenImageModel:
    """What trains, to be changed."""
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: QwenImageModel) -> Ask:
    """A request of two samples for each prompt, oblong; the version is the engine's."""
    return asking(model, prompts=PROMPTS, height=32, width=48, max_sequence_length=32)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[HostedLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    environments.make("sglang")
    model = build(QwenImageConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(SglangConfig(max_num_seqs=4), model=model, device="cpu")
    yield engine
    engine.close()


@pytest.mark.parametrize("mode", ["", "norm-corrected", "two-pass", "batched"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: HostedLatentEngine, model: QwenImageModel, ask: Ask, mode: str
) -> None:
    """Of the same noise, without guidance and in every mode of it, with a negative prompt of another length."""
    engine.load_weights(full_update(model, version=1))
    guided: dict[str, Any] = {"guidance_mode": mode, "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}
    request = ask(engine, **(guided if mode else {}))
    found = engine.generate(request).tracks["image"]
    assert gap(found, model) < ROUNDING
    assert_same(found, trainside(model, request))


def test_prompts_longer_than_the_model_takes_are_refused(engine: HostedLatentEngine, ask: Ask) -> None:
    with pytest.raises(RunFailed, match="max_sequence_length: 1025 was asked for; qwen-image takes 1 to 1024"):
        engine.generate(ask(engine, max_sequence_length=1025))
