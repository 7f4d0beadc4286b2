"""What every engine that runs Qwen-Image is tried for: its test module imports all of this.

The module has a fixture `engine`, without room for more than four rows together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.workbench.trained import full_update
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.runtime.engine_host.latent_engine import HostedLatentEngine

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
"""Of different lengths, so that a batch has rows that are masked; the second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> QwenImageModel:
    """What trains, with the weights of the checkpoint, to be changed."""
    return build(QwenImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: QwenImageModel) -> Ask:
    """Oblong, so that height and width cannot be taken for each other."""
    return asking(model, prompts=PROMPTS, height=32, width=48, max_sequence_length=32)


@pytest.mark.parametrize("mode", ["", "norm-corrected", "two-pass", "batched"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: HostedLatentEngine, model: QwenImageModel, ask: Ask, mode: str
) -> None:
    """Of the same noise, without guidance and in every mode of it, with a negative prompt of another length. Ten
    forwards at most of fp32 arithmetic in another order are 1e-6 off, in latents of order 1 and log-probs of their
    mean."""
    engine.load_weights(full_update(model, version=1))
    guided: dict[str, Any] = {"guidance_mode": mode, "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}
    request = ask(engine, **(guided if mode else {}))
    found = engine.generate(request).tracks["image"]
    assert gap(found, model) < ROUNDING
    assert_same(found, trainside(model, request))
