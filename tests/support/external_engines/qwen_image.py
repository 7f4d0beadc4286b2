"""Tests for every engine that runs Qwen-Image: its test module imports all of them.

The module has a fixture `engine` with a batch size of at most four.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles.weight_updates import full_update
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build

from .latent_engines import (
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_what_was_asked_for_comes_back,
)
from .latents import ROUNDING, Ask, asking, assert_same, gap, trainside

__all__ = [
    "ask",
    "model",
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_samples_and_log_probs_are_those_that_the_trainer_would_have_made",
    "test_what_was_asked_for_comes_back",
]

PROMPTS = ("a red ring", "a blue square on the left of two green discs, and behind them all a dog", "")
"""Prompts of different lengths, so that batches have masked rows; the second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> QwenImageModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: QwenImageModel) -> Ask:
    """Not square, so that swapped height and width are caught."""
    return asking(model, prompts=PROMPTS, height=32, width=48, max_sequence_length=32)


@pytest.mark.parametrize("mode", ["", "norm-corrected", "two-pass", "batched"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: ExternalLatentEngine, model: QwenImageModel, ask: Ask, mode: str
) -> None:
    """From the same noise, without guidance and in every guidance mode, with a negative prompt of another length. At
    most ten fp32 forwards with another summation order differ by 1e-6, in latents of order 1 and averaged log-probs."""
    engine.load_weights(full_update(model, version=1))
    guided: dict[str, Any] = {"guidance_mode": mode, "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}
    request = ask(engine, **(guided if mode else {}))
    result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))
