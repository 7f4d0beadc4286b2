"""vLLM with models that read images, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.image_engines import *
from external_engines.image_engines import build_model, faulty
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.engines.vllm.environment import PRODUCT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def engine(request: pytest.FixtureRequest, kind: str, folder: Path) -> Iterator[ExternalTextEngine]:
    """With room for adapters, and faults. Its weights are those that the test before left."""
    make("vllm")
    settings = VllmConfig(tensor_parallel=request.param, kv_cache_mb=64, max_num_seqs=16, lora_rank=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unirl.engines.vllm.engine.PRODUCT", faulty(PRODUCT))
        engine = build(settings, model=build_model(kind, folder), device="cpu")
    yield engine
    engine.close()
