"""SGLang with models that read images, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.image_engines import *
from external_engines.image_engines import build_model, faulty
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.sglang_llm.config import SglangConfig
from unirl.engines.sglang_llm.engine import build
from unirl.engines.sglang_llm.environment import PRODUCT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine(kind: str, folder: Path) -> Iterator[ExternalTextEngine]:
    """With room for adapters, and faults. Its weights are those that the test before left."""
    make("sglang-llm")
    settings = SglangConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unirl.engines.sglang_llm.engine.PRODUCT", faulty(PRODUCT))
        engine = build(settings, model=build_model(kind, folder), device="cpu")
    yield engine
    engine.close()
