"""Qwen-Image in vLLM-Omni itself, on a CPU: what every engine that runs it is tried for, and what is its own.

In the earliest release that the engine takes. The newest one runs the tests of the engine itself, and every claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines import environments
from external_engines.latents import ROUNDING, Ask, adapter, assert_same, gap
from external_engines.qwen_image import *
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import EchoMismatch
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_engine
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build

pytestmark = pytest.mark.slow

EARLIEST = "0.30.0"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "engine.log"


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, log: Path) -> Iterator[ExternalLatentEngine]:
    """Batches of four; its weights are those that the test before left."""
    environments.make("vllm-omni", release=EARLIEST)
    model = build(QwenImageConfig(path=str(tiny_folder)), device="cpu")
    config = VllmOmniConfig(max_num_seqs=4, release=EARLIEST, log_file=str(log))
    engine = build_engine(config, model=model, device="cpu")
    yield engine
    engine.close()


def test_its_log_says_which_release_it_is(engine: ExternalLatentEngine, log: Path) -> None:
    assert f"engine 'vllm-omni': version {EARLIEST}, run by " in log.read_text(encoding="utf-8")


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: ExternalLatentEngine, ask: Ask) -> None:
    request = ask(engine)
    whole = engine.generate(request)
    assert max(engine.batches) == 4
    assert_same(engine.generate(request.select([4])), whole.select([4]))


def test_an_adapter_that_it_would_put_beside_what_it_computes_with_is_refused(
    engine: ExternalLatentEngine, model: QwenImageModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    update, _ = adapter(model, targets=("img_in",), version=2)
    with pytest.raises(EchoMismatch, match=r"got an adapter for 'img_in', .* backend\.lora\.targets"):
        engine.load_weights(update)
    assert gap(engine.generate(ask(engine)), model) < ROUNDING
