"""A run on an engine that its test module has started already, because starting one takes longest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.roles import Model
from unirl.engine_host import external
from unirl.engine_host.external import UNSYNCED, ExternalEngine
from unirl.engine_host.process import Program

__all__ = ["lent"]


@contextlib.contextmanager
def lent(engine: ExternalEngine, model: Model) -> Iterator[None]:
    """The next engine to be built gets the process of `engine`, as it was after its start, in place of a new one.

    It fails if that engine would start another program, if its arguments differ from those that the process has loaded,
    and if it does not load weights or generate. All else of its start is as ever: its version, the names of its weights
    and the probe requests are checked. model: with the weights of the checkpoint, which the process gets before and
    after.
    """
    process = _LentProcess(engine)

    def take(program: Program) -> _LentProcess:
        assert not process.calls, "a second engine was built"
        assert dataclasses.replace(program, log=None) == dataclasses.replace(process.program, log=None)
        return process

    engine.load_weights(full_update(model, version=UNSYNCED))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(external, "EngineProcess", take)
            yield
    finally:
        engine.load_weights(full_update(model, version=UNSYNCED))
    assert {"version", "load", "load_weights", "generate"} <= process.calls, f"only {process.calls} were called"


class _LentProcess:
    """An `EngineProcess` that another engine has started and will close."""

    def __init__(self, engine: ExternalEngine) -> None:
        self._engine, self._process = engine, engine._process
        self.program = self._process.program
        self.calls: set[str] = set()

    def start(self) -> None:
        assert self._process.is_running

    def close(self) -> None:
        """Its owner does."""

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def note(self, text: str) -> None:
        self._process.note(text)

    def call(self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
        self.calls.add(name)
        if name != "load":
            return self._process.call(name, arguments, **options)
        assert arguments == self._engine._hosting.arguments
        return {"weights": [(name, held.dtype, held.shape) for name, held in self._engine._held.items()]}, {}
