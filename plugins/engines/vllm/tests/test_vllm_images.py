"""vLLM with models that read images, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.image_engines import *
from external_engines.image_engines import build_model, faulty
from external_engines.latents import Fault
from external_engines.texts import ROUNDING, gap
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import RunFailed
from unirl.core.roles import TextModel
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.engines.vllm.environment import PRODUCT
from unirl.models.qwen_vl import tiny

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


def test_images_in_the_prefix_cache_are_read_as_any_other(
    engine: ExternalTextEngine, model: TextModel, folder: Path, fault: Fault
) -> None:
    """Prompts of more than the 128 tokens of a block, sent again between two syncs, as in an evaluation."""
    engine.load_weights(full_update(model, version=1))
    request = make_request(
        model,
        TextSamplingConfig(max_new_tokens=8),
        track="text",
        prompts=["What is it? " * 25] * 2,
        # Of one size.
        media=lambda number: tiny.media(folder, number=(2, 5)[number]),
        samples_per_prompt=1,
        seed=0,
        policy_version=engine.version,
    )
    for _ in range(2):
        assert gap(engine.generate(request), model) < ROUNDING
    fault("shows_images_of_others")
    with pytest.raises(RunFailed, match="the completion of row 0 was generated from other media than its own"):
        engine.generate(request)
    fault("")
    assert gap(engine.generate(request), model) < ROUNDING
