"""BAGEL's texts from vLLM, on a CPU and in fp32, against those of the trained module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bagel_runs import SMALL, run
from external_engines.environments import make
from external_engines.text_engines import (
    test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated,
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_greedy_texts_are_those_of_the_trainer,
    test_log_probs_are_those_of_the_weights_at_the_sampling_temperature,
)
from external_engines.texts import ROUNDING, Ask, gap
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import DataError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build as build_engine
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

__all__ = [
    "test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated",
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_greedy_texts_are_those_of_the_trainer",
    "test_log_probs_are_those_of_the_weights_at_the_sampling_temperature",
]


@pytest.fixture
def model(tiny_folder: Path) -> BagelModel:
    """With the weights of the checkpoint, to be modified by tests."""
    return build(BagelConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalTextEngine]:
    """With room for adapters. Its weights are those that the test before left."""
    make("vllm")
    settings = VllmConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=4)
    # Without weights, as in a worker that only generates.
    lazy = build(BagelConfig(path=str(tiny_folder)), device="cpu", lazy=True)
    engine = build_engine(settings, model=lazy, device="cpu")
    yield engine
    engine.close()


@pytest.fixture
def ask(model: BagelModel) -> Ask:
    """A request of two samples for each prompt; the version is the engine's."""

    def made(engine: ExternalTextEngine, *, seed: int = 0, media: Any = lambda number: (), **settings: Any) -> Request:
        return make_request(
            model,
            TextSamplingConfig(**{"max_new_tokens": 16, **settings}),
            track="text",
            prompts=("What is it?", "Plan an image of two blue squares.", "a"),
            media=media,
            samples_per_prompt=2,
            seed=seed,
            policy_version=engine.version,
        )

    return made


def test_a_text_continues_from_turns_behind_a_system_prompt(
    engine: ExternalTextEngine, model: BagelModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, system_prompt="Plan first.")
    turns = tuple((Turn(stage="plan", text="x", tokens=(70, 71 + row // 2)),) for row in range(request.num_rows))
    inputs = dataclasses.replace(request.inputs, turns=turns)
    tokens = tuple(model.prompt_tokens(inputs, sampling=request.text.sampling))
    params = dataclasses.replace(request.text, prompt_tokens=tokens)
    assert gap(engine.generate(dataclasses.replace(request, inputs=inputs, params=params)), model) < ROUNDING


def test_images_are_refused_with_the_reason(
    engine: ExternalTextEngine, model: BagelModel, ask: Ask, media: list[tuple[MediaRef, ...]]
) -> None:
    """Before anything is sent: vLLM has no ViT here."""
    engine.load_weights(full_update(model, version=1))
    with pytest.raises(DataError, match=r"got images, of which engine 'vllm' is given none: it scales every image"):
        engine.generate(ask(engine, media=lambda number: media[number]))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def test_plans_of_vllm_and_images_of_vllm_omni_train_one_model_in_one_step(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters on both experts, of which vLLM is sent those of texts."""
    make("vllm-omni")
    monkeypatch.chdir(tmp_path)
    words = ["engine@engine.plan=vllm", "engine.plan.kv_cache_mb=64", "engine.plan.lora_rank=32"]
    words += ["engine@engine.image=vllm-omni"]
    steps = run(tmp_path, tiny_folder, *SMALL, *words, has_sources=False)
    assert len(steps) == 2
    for step in steps:
        for track in ("plan", "image"):
            assert step[f"{track}/logp_mismatch_max"] <= ROUNDING and step[f"{track}/grad_norm"] > 0
