"""Completions of a Qwen3 miniature from an engine, compared with those of the trained module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles.requests import make_request
from unirl.core.roles import TextModel
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model, build
from unirl.numerics.tokens.replay import replay_text
from unirl.numerics.tokens.rollout import generate_text, text_conditions

__all__ = ["ROUNDING", "Ask", "ask", "assert_greedy", "folder", "gap", "model"]

Ask = Callable[..., Request]
PROMPTS = ("What is 47 + 85?", "Say it in French: the ring is red.", "a")
ROUNDING = 1e-5
"""Bound of a log-prob's difference, in nats: two libraries sum fp32 logits of order 10 in different orders, with a
relative error of a few times 1e-7 over some hundred terms. Weights of another version are off by 1e-1 and more."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature with tied embeddings, as in the small Qwen3 checkpoints."""
    made = tmp_path_factory.mktemp("qwen3") / "dense"
    tiny.write(made, seed=0)
    return made


@pytest.fixture
def model(folder: Path) -> Qwen3Model:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Qwen3Config(path=str(folder)), device="cpu")


@pytest.fixture(scope="session")
def ask(folder: Path) -> Ask:
    """A request of two samples for each prompt; the version is the engine's."""
    model = build(Qwen3Config(path=str(folder)), device="cpu")

    def make(
        engine: ExternalTextEngine, *, stop_tokens: tuple[int, ...] | None = None, seed: int = 0, **settings: Any
    ) -> Request:
        request = make_request(
            model,
            TextSamplingConfig(**{"max_new_tokens": 16, **settings}),
            track="text",
            prompts=PROMPTS,
            samples_per_prompt=2,
            seed=seed,
            policy_version=engine.version,
        )
        if stop_tokens is None:
            return request
        text = dataclasses.replace(request.text, stop_tokens=stop_tokens)
        return dataclasses.replace(request, params=text)

    return make


def gap(track: Track, model: TextModel) -> float:
    """Largest difference to the trainer's log-probs of the same tokens."""
    result = replay_text(model, track, packing=False, with_entropy=False).log_probs.detach()
    assert track.text.log_probs is not None
    return max(float((result[row, : len(own)] - own).abs().max()) for row, own in enumerate(track.text.log_probs))


def assert_greedy(engine: ExternalTextEngine, model: TextModel, ask: Ask) -> None:
    """Token for token; ties do not occur with random weights."""
    request = ask(engine, temperature=0.0)
    conditions = text_conditions(model, request.inputs, sampling=request.text.sampling)
    here, there = engine.generate(request).text, generate_text(model, request.text, conditions=conditions)
    assert [row.tolist() for row in here.tokens] == [row.tolist() for row in there.tokens]
    assert here.log_probs is not None
    for own, other in zip(here.log_probs, there.log_probs, strict=True):
        assert float((own - other).abs().max()) < ROUNDING
