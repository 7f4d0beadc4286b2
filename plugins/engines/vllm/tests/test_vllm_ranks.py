"""vLLM with a model that is split over ranks: layers that the dense miniature with two ranks does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from external_engines.environments import make
from external_engines.texts import ROUNDING, gap
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update, perturb
from unirl.core.errors import RecipeError
from unirl.core.roles import TextModel
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_dense
from unirl.models.qwen3.model import build_moe

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@contextmanager
def started(model: TextModel, *, ranks: int, **settings: Any) -> Iterator[ExternalTextEngine]:
    make("vllm")
    engine = build(
        VllmConfig(tensor_parallel=ranks, kv_cache_mb=64, max_num_seqs=16, **settings), model=model, device="cpu"
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("write", "build_model", "ranks"),
    [
        # Experts, each split, and an output projection that is not the embedding.
        (tiny.write_moe, build_moe, 2),
        # Two heads of keys and values on four ranks: neighbours have the same ones.
        (tiny.write, build_dense, 4),
    ],
    ids=["experts", "fewer-keys-than-ranks"],
)
def test_it_samples_from_what_was_sent(
    write: Callable[..., None], build_model: Callable[..., TextModel], ranks: int, tmp_path: Path
) -> None:
    write(tmp_path, seed=0)
    model = build_model(Qwen3Config(path=str(tmp_path)), device="cpu")
    with started(model, ranks=ranks) as engine:
        for version in (1, 2):
            perturb(model, seed=version)
            engine.load_weights(full_update(model, version=version))
            request = make_request(
                model,
                TextSamplingConfig(max_new_tokens=16),
                track="text",
                prompts=["What is 47 + 85?", "a"],
                samples_per_prompt=2,
                seed=0,
                policy_version=version,
            )
            assert gap(engine.generate(request), model) < ROUNDING


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0)
    model = build_dense(Qwen3Config(path=str(tmp_path)), device="cpu")
    with pytest.raises(RecipeError, match="got 3, expected a divisor of 4"), started(model, ranks=3):
        pass
