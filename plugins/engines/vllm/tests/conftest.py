"""One vLLM for all tests of its process: starting it takes longest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from unirl.core.config import TextSamplingConfig
from unirl.core.errors import RunFailed
from unirl.core.request import Request, TextRequest
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model
from unirl.models.qwen3.model import build as build_model
from unirl.runtime.engine_host.command import command
from unirl.runtime.engine_host.text_engine import HostedTextEngine

OUT_OF_REACH = re.compile(
    r"dns error|connect|timed? ?out|unreachable|no version of torch|name resolution", re.IGNORECASE
)
"""What uv and pip say when an index does not answer, or does not have torch for CPUs."""
RANK = 4
"""Of the adapters that the tests send."""
PROMPTS = ("What is 47 + 85?", "Say it in French: the ring is red.", "a")


@pytest.fixture(scope="session")
def environment() -> None:
    """vLLM's environment, made by the command itself; there from then on, for every session with the same lock.

    Where the package index is out of reach, or has no torch for CPUs, the tests that need it are reported as not run.
    Anything else, such as a file that does not match its hash, fails.
    """
    done = CliRunner().invoke(command, ["vllm", "--accel", "cpu"])
    if done.exception is None:
        return
    if isinstance(done.exception, RunFailed) and OUT_OF_REACH.search(str(done.exception)):
        pytest.skip(f"not run: no environment for vLLM: {done.exception}")
    raise done.exception


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature whose output layer is its embedding, as in the small checkpoints of Qwen3."""
    made = tmp_path_factory.mktemp("vllm") / "dense"
    tiny.write(made, seed=0)
    return made


@pytest.fixture
def model(folder: Path) -> Qwen3Model:
    """What trains, with the weights of the checkpoint, to be changed."""
    return build_model(Qwen3Config(path=str(folder)), device="cpu")


@pytest.fixture(scope="session")
def engine(environment: None, folder: Path) -> Iterator[HostedTextEngine]:
    """With room for adapters. Its weights are those that the test before left."""
    model = build_model(Qwen3Config(path=str(folder)), device="cpu")
    # So few tokens a step that two long prompts do not go together.
    extra = {"max_num_batched_tokens": 512}
    settings = VllmConfig(kv_cache_mb=64, max_num_seqs=16, lora_rank=RANK, extra=extra)
    engine = build(settings, model=model, device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def ask(folder: Path) -> Callable[..., Request]:
    """A request of two samples for each prompt; the version is the engine's."""
    model = build_model(Qwen3Config(path=str(folder)), device="cpu")

    def make(
        engine: HostedTextEngine, *, stop_tokens: tuple[int, ...] | None = None, seed: int = 0, **sampling: Any
    ) -> Request:
        settings = TextSamplingConfig(**{"max_new_tokens": 16, **sampling})
        tokens = model.prompt_tokens(PROMPTS, sampling=settings)
        rows = [row for row in range(len(PROMPTS)) for _ in range(2)]
        count = len(rows)
        text = TextRequest(
            sampling=settings,
            prompt_tokens=tuple(tokens[row] for row in rows),
            stop_tokens=model.stop_tokens if stop_tokens is None else stop_tokens,
            # Seeds have 63 bits.
            seeds=tuple(2**62 + 1000 * seed + number for number in range(count)),
        )
        return Request(
            sample_ids=tuple(f"s{number}" for number in range(count)),
            group_ids=tuple(f"g{row}" for row in rows),
            prompt_ids=tuple(f"p{row}" for row in rows),
            prompts=tuple(PROMPTS[row] for row in rows),
            metadata=({},) * count,
            media=((),) * count,
            tracks={"text": text},
            seed=0,
            rollout=0,
            policy_version=engine.version,
        )

    return make
