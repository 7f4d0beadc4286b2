"""vLLM-Omni's batches come back whole, whichever of its threads is first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.latents import ROUNDING, Ask, gap
from unirl.conformance.doubles.weight_updates import full_update
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build
from unirl.engines.vllm_omni.environment import ENVIRONMENT, PRODUCT
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

IN_A_PROCESS = {"distributed_executor_backend": "mp"}
"""The worker is a separate process, as in vLLM-Omni for several GPUs and always for Wan 2.2."""


@pytest.mark.parametrize("release", ["", "0.30.0"])
def test_the_output_of_a_batch_that_is_still_being_registered_is_not_lost(
    release: str, folder: Path, model: Sd3Model, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `batch_outputs`, `generate` ends here with its timeout, for it waits for good."""
    make("vllm-omni", release=release)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    late = dataclasses.replace(ENVIRONMENT, serve="late_batches:calls", modules=(*ENVIRONMENT.modules, "late_batches"))
    monkeypatch.setattr("unirl.engines.vllm_omni.engine.PRODUCT", dataclasses.replace(PRODUCT, environment=late))
    config = VllmOmniConfig(max_num_seqs=4, release=release, generate_timeout_s=120, extra=IN_A_PROCESS)
    engine = build(config, model=build_model(Sd3Config(path=str(folder)), device="cpu"), device="cpu")
    try:
        engine.load_weights(full_update(model, version=1))
        result = engine.generate(ask(engine))
        assert max(engine.batches) > 1, "no rows shared a batch"
        assert gap(result, model) < ROUNDING
    finally:
        engine.close()
