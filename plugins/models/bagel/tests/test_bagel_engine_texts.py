"""BAGEL's texts from vLLM-Omni, on a CPU and in fp32, against those of the trained module: from the same process, and with
the same weights, as its images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.environments import make
from external_engines.text_engines import (
    test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated,
    test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit,
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_greedy_texts_are_those_of_the_trainer,
    test_log_probs_are_those_of_the_weights_at_the_sampling_temperature,
)
from external_engines.texts import Ask
from unirl.conformance.doubles.requests import make_request
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_engine
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build

__all__ = [
    "test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated",
    "test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit",
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_greedy_texts_are_those_of_the_trainer",
    "test_log_probs_are_those_of_the_weights_at_the_sampling_temperature",
]
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ("a red ring", "two blue squares on the left", "it")


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Texts four at a time; its weights are those that the test before left."""
    make("vllm-omni")
    own = build(BagelConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(VllmOmniConfig(max_num_seqs=4, max_num_texts=4), model=own, device="cpu")
    yield engine
    engine.close()


@pytest.fixture
def model(tiny_folder: Path) -> BagelModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(BagelConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def ask(tiny_folder: Path) -> Ask:
    """A request of two samples for each prompt; the version is the engine's."""
    own = build(BagelConfig(path=str(tiny_folder)), device="cpu")

    def make(
        engine: ExternalLatentEngine,
        *,
        stop_tokens: tuple[int, ...] | None = None,
        seed: int = 0,
        media: Any = lambda number: (),
        **settings: Any,
    ) -> Request:
        request = make_request(
            own,
            TextSamplingConfig(**{"max_new_tokens": 16, **settings}),
            track="text",
            prompts=PROMPTS,
            media=media,
            samples_per_prompt=2,
            seed=seed,
            policy_version=engine.version,
        )
        if stop_tokens is None:
            return request
        return dataclasses.replace(request, params=dataclasses.replace(request.text, stop_tokens=stop_tokens))

    return make
