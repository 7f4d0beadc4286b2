"""One SGLang for all tests of its process: starting it takes longest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.listening import Listening
from external_engines.texts import ask, folder, model
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.sglang_llm.config import SglangConfig
from unirl.engines.sglang_llm.engine import build
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_model

__all__ = ["ask", "engine", "folder", "listening", "model"]


@pytest.fixture(scope="session")
def listening() -> Listening:
    """The TCP addresses that the engine listened on during its start."""
    return Listening()


@pytest.fixture(scope="session")
def engine(folder: Path, listening: Listening) -> Iterator[ExternalTextEngine]:
    """With room for adapters. Its weights are those that the test before left."""
    make("sglang-llm")
    # So few tokens a step that two long prompts do not go together.
    extra = {"chunked_prefill_size": 512}
    settings = SglangConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=4, extra=extra)
    # Without weights, as in a worker that only generates.
    model = build_model(Qwen3Config(path=str(folder)), device="cpu", lazy=True)
    with listening.watched():
        engine = build(settings, model=model, device="cpu")
    yield engine
    engine.close()
