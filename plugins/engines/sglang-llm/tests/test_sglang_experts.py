"""SGLang with a mixture of experts, on a CPU: its log-probs, and syncs of all weights and of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from external_engines.environments import make
from external_engines.text_engines import (  # noqa: F401
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_greedy_texts_are_those_of_the_trainer,
    test_log_probs_are_those_of_the_weights_at_the_sampling_temperature,
    test_updates_that_do_not_fit_are_refused_and_change_nothing,
)
from external_engines.texts import ROUNDING, Ask, gap
from unirl.conformance.doubles.weight_updates import full_update
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.sglang_llm.config import SglangConfig
from unirl.engines.sglang_llm.engine import build
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model, build_moe

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts a layer, two of them at work for a token. The tokenizer is that of the dense miniature."""
    made = tmp_path_factory.mktemp("qwen3") / "moe"
    tiny.write_moe(made, seed=0)
    return made


@pytest.fixture
def model(experts_folder: Path) -> Qwen3Model:
    return build_moe(Qwen3Config(path=str(experts_folder)), device="cpu")


@pytest.fixture(scope="module")
def engine(experts_folder: Path) -> Iterator[ExternalTextEngine]:
    make("sglang-llm")
    settings = SglangConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=4)
    model = build_moe(Qwen3Config(path=str(experts_folder)), device="cpu", lazy=True)
    engine = build(settings, model=model, device="cpu")
    yield engine
    engine.close()


def test_each_expert_is_the_one_that_was_sent(engine: ExternalTextEngine, model: Qwen3Model, ask: Ask) -> None:
    """Only one part of one expert of a layer is changed at a time."""
    experts = model.causal_lm.model.layers[1].mlp.experts
    for version, (weight, row) in enumerate([("gate_up_proj", 1), ("gate_up_proj", -1), ("down_proj", 0)], start=1):
        with torch.no_grad():
            experts.get_parameter(weight)[2, row].add_(1.0)
        stale = engine.generate(ask(engine))
        engine.load_weights(full_update(model, version=version))
        assert gap(stale, model) > 10 * ROUNDING, "the check does not see one row of one expert"
        assert gap(engine.generate(ask(engine)), model) < ROUNDING
