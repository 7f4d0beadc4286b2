"""Qwen-Image in SGLang itself, on a CPU: what every engine that runs it is tried for, and what is its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines import environments
from external_engines.latents import Ask
from external_engines.qwen_image import *
from unirl.core.errors import RunFailed
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build as build_engine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    environments.make("sglang")
    model = build(QwenImageConfig(path=str(tiny_folder)), device="cpu")
    engine = build_engine(SglangConfig(max_num_seqs=4), model=model, device="cpu")
    yield engine
    engine.close()


def test_prompts_longer_than_the_model_takes_are_refused(engine: ExternalLatentEngine, ask: Ask) -> None:
    """By its bridge as well, which is given requests of anyone."""
    request = ask(engine)
    sampling = dataclasses.replace(request.params.sampling, max_sequence_length=1025)
    longer = dataclasses.replace(request, params=dataclasses.replace(request.params, sampling=sampling))
    with pytest.raises(RunFailed, match="max_sequence_length: got 1025; qwen-image takes 1 to 1024"):
        engine.generate(longer)
