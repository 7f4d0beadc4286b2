"""Engines whose processes start with everything imported. Imports are most of a start: 5 s of CPU for each process of an
engine, and SGLang has two.

`forked_starts` makes `EngineProcess.start` run the stub of `fork_server` in place of the interpreter of the engine's
environment, for one forking process for each environment and its variables. All else is as ever: the guard and the
server of `unirl.engine_host.serving`, what they are passed, calls, errors, and the end. Not proven by such a start are
those that the docstring of `fork_server` names, and that the engine's packages can be imported in the order in which
the server and its workers do it. So an engine's own tests start it as users do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fork_server
import pytest
from unirl.engine_host import process
from unirl.engine_host.process import EngineProcess

__all__ = ["forked_engines", "forked_starts"]

PRELOAD = {
    "engines.sglang": (
        "sglang.multimodal_gen.runtime.managers.gpu_worker",
        "sglang.multimodal_gen.runtime.managers.scheduler",
    ),
    "engines.sglang_llm": ("sglang.srt.entrypoints.engine", "sglang.srt.model_executor.model_runner"),
    "engines.vllm": ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"),
    "engines.vllm_omni": (
        "vllm_omni.diffusion.registry",
        "vllm_omni.entrypoints.async_omni",
        "vllm_omni.diffusion.worker.diffusion_worker",
    ),
}
"""Package of an engine in `unirl` -> modules of its environment that its processes import. None of them starts a thread,
or is of UniRL."""


@contextmanager
def forked_starts() -> Iterator[None]:
    """Engines of `PRELOAD` that start here start as forks."""
    start = EngineProcess.start

    @functools.wraps(start)
    def forked(engine: EngineProcess) -> None:
        program = engine.program
        environment = tuple(sorted(process._variables(program).items()))
        preload = PRELOAD[f"engines.{program.name.replace('-', '_')}"]
        python = fork_server.stub(str(program.python), preload=preload, environment=environment, flags=("-I",))
        engine.program = dataclasses.replace(program, python=Path(python))
        try:
            start(engine)
        finally:
            engine.program = program

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineProcess, "start", forked)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_engines() -> Iterator[None]:
    """All engines of a test module that has this fixture start as forks."""
    with forked_starts():
        yield
