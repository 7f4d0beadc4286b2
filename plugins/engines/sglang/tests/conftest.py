"""One SGLang for all tests of its process: starting it takes longest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from unirl.core.config import LatentSamplingConfig, SdeStepsConfig
from unirl.core.errors import RunFailed
from unirl.core.request import Request
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import SglangEngine, build
from unirl.engines.sglang.environment import ENVIRONMENT, PRODUCT
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model
from unirl.numerics.latent_request import plan_latents
from unirl.runtime.engine_host.command import command

OUT_OF_REACH = re.compile(
    r"dns error|connect|timed? ?out|unreachable|no version of torch|name resolution", re.IGNORECASE
)
"""What uv and pip say when an index does not answer, or does not have torch for CPUs."""
PROMPTS = ("a red ring", "a blue square on the left", "")


@pytest.fixture(scope="session")
def environment() -> None:
    """SGLang's environment, made by the command itself; there from then on, for every session with the same lock.

    Where the package index is out of reach, or has no torch for CPUs, the tests that need it are reported as not run.
    Anything else, such as a file that does not match its hash, fails.
    """
    done = CliRunner().invoke(command, ["sglang", "--accel", "cpu"])
    if done.exception is None:
        return
    if isinstance(done.exception, RunFailed) and OUT_OF_REACH.search(str(done.exception)):
        pytest.skip(f"not run: no environment for SGLang: {done.exception}")
    raise done.exception


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sglang") / "tiny"
    tiny.write(made, seed=0)
    return made


@pytest.fixture
def model(folder: Path) -> Sd3Model:
    """What trains, with the weights of the checkpoint, to be changed."""
    return build_model(Sd3Config(path=str(folder)), device="cpu")


@pytest.fixture(scope="session")
def engine(environment: None, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """It makes batches of four, can sleep, and its server has faults that can be switched on. Its weights are those
    that the test before left."""
    modules = (*ENVIRONMENT.modules, "faulty_server", "unirl.models.sd3.bridges.sglang")
    faulty = dataclasses.replace(ENVIRONMENT, serve="faulty_server:calls", modules=modules)
    model = build_model(Sd3Config(path=str(folder)), device="cpu")
    with pytest.MonkeyPatch.context() as patched:
        # Also where a test ends the process, and another one starts.
        patched.syspath_prepend(str(Path(__file__).parent))
        patched.setattr("unirl.engines.sglang.engine.PRODUCT", dataclasses.replace(PRODUCT, environment=faulty))
        # SGLang's worker is another process than its server, and imports the bridge.
        patched.setattr("unirl.engines.sglang.engine.bridge_name", lambda *_: "faulty_server:BRIDGE")
        weights = str(tmp_path_factory.mktemp("weights"))
        config = SglangConfig(max_num_seqs=4, sleep_mode=True, transfer_dir=weights)
        engine = build(config, model=model, device="cpu")
        yield engine
        engine.close()


@pytest.fixture
def fault(engine: SglangEngine) -> Iterator[Callable[[str], None]]:
    """Switches a fault of the server on, and all off at the end."""
    process: Any = engine._process

    def switch(name: str) -> None:
        process.call("fault", {"name": name}, timeout_s=30)

    yield switch
    if process.is_running:
        switch("")


@pytest.fixture(scope="session")
def ask(folder: Path) -> Callable[..., Request]:
    """A request of two samples for each prompt; the version is the engine's."""
    model = build_model(Sd3Config(path=str(folder)), device="cpu")

    def make(
        engine: SglangEngine,
        *,
        seed: int = 5,
        trajectory: Any = "window",
        per_group: bool = False,
        **sampling: Any,
    ) -> Request:
        sde = SdeStepsConfig(mode="random", count=2, per_group=per_group)
        settings = LatentSamplingConfig(
            **{"steps": 5, "height": 64, "width": 64, "max_sequence_length": 16, "sde": sde, **sampling}
        )
        rows = [row for row in range(len(PROMPTS)) for _ in range(2)]
        sample_ids = tuple(f"s{number}" for number in range(len(rows)))
        group_ids = tuple(f"g{row}" for row in rows)
        wanted = plan_latents(
            settings,
            sigmas=model.schedule(settings),
            latent_shape=model.latent_shape(settings),
            seed=seed,
            rollout=3,
            sample_ids=sample_ids,
            group_ids=group_ids,
        )
        return Request(
            sample_ids=sample_ids,
            group_ids=group_ids,
            prompt_ids=tuple(f"p{row}" for row in rows),
            prompts=tuple(PROMPTS[row] for row in rows),
            metadata=({},) * len(rows),
            media=((),) * len(rows),
            tracks={"image": type(wanted)(**{**vars(wanted), "trajectory": trajectory})},
            seed=seed,
            rollout=3,
            policy_version=engine.version,
        )

    return make
