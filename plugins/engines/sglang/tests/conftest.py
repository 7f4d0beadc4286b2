"""One SGLang for all tests of a file: starting it takes longest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.latents import fault
from external_engines.listening import Listening
from external_engines.sd3_latents import ask, folder, model
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build
from unirl.engines.sglang.environment import ENVIRONMENT, PRODUCT
from unirl.models.sd3.bridges.sglang import BRIDGE
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import build as build_model

__all__ = ["ask", "engine", "fault", "folder", "listening", "model"]


@pytest.fixture(scope="module")
def listening() -> Listening:
    """The TCP addresses that the engine listened on during its start."""
    return Listening()


@pytest.fixture(scope="module")
def engine(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, listening: Listening
) -> Iterator[ExternalLatentEngine]:
    """It makes batches of four, can sleep, and its server has faults that can be switched on. Its weights are those
    that the test before left."""
    make("sglang")
    modules = (*ENVIRONMENT.modules, "faulty_sglang", "external_engines.faults")
    faulty = dataclasses.replace(ENVIRONMENT, serve="faulty_sglang:calls", modules=modules)
    # Without weights, as in a worker that only generates.
    model = build_model(Sd3Config(path=str(folder)), device="cpu", lazy=True)
    config = SglangConfig(max_num_seqs=4, sleep_mode=True, transfer_dir=str(tmp_path_factory.mktemp("weights")))
    with pytest.MonkeyPatch.context() as lasting:
        # Also where a test ends the process, and another one starts.
        lasting.syspath_prepend(str(Path(__file__).parent))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("unirl.engines.sglang.engine.PRODUCT", dataclasses.replace(PRODUCT, environment=faulty))
            # SGLang's worker is another process than its server, and imports the bridge.
            patched.setattr("unirl.engines.sglang.engine.fitting_bridge", lambda *_: ("faulty_sglang:BRIDGE", BRIDGE))
            with listening.watched():
                engine = build(config, model=model, device="cpu")
        yield engine
        engine.close()
