"""One SGLang for all tests of its process: starting it takes longest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_engines.environments import make
from hosted_engines.texts import ask, folder, model
from unirl.engines.sglang_llm.config import SglangConfig
from unirl.engines.sglang_llm.engine import build
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_model
from unirl.runtime.engine_host.text_engine import HostedTextEngine

__all__ = ["ask", "engine", "folder", "model"]


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[HostedTextEngine]:
    """With room for adapters. Its weights are those that the test before left."""
    make("sglang-llm")
    # So few tokens a step that two long prompts do not go together.
    extra = {"chunked_prefill_size": 512}
    settings = SglangConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=4, extra=extra)
    engine = build(settings, model=build_model(Qwen3Config(path=str(folder)), device="cpu"), device="cpu")
    yield engine
    engine.close()
