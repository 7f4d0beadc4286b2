"""One vLLM for all tests of its process, and one split over two ranks: starting it takes longest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.listening import Listening
from external_engines.texts import ask, folder, model
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_model

__all__ = ["ask", "engine", "folder", "listening", "model"]


@pytest.fixture(scope="session")
def listening() -> Listening:
    """The TCP addresses that the engine listened on during its start."""
    return Listening()


@pytest.fixture(scope="session", params=[1, 2], ids=["one-rank", "two-ranks"])
def engine(request: pytest.FixtureRequest, folder: Path, listening: Listening) -> Iterator[ExternalTextEngine]:
    """With room for adapters. Its weights are those that the test before left."""
    make("vllm")
    # So few tokens a step that two long prompts do not go together.
    extra = {"max_num_batched_tokens": 512}
    settings = VllmConfig(tensor_parallel=request.param, kv_cache_mb=64, max_num_seqs=16, lora_rank=4, extra=extra)
    # Without weights, as in a worker that only generates.
    model = build_model(Qwen3Config(path=str(folder)), device="cpu", lazy=True)
    with listening.watched():
        engine = build(settings, model=model, device="cpu")
    yield engine
    engine.close()
