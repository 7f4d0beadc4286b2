"""Models that train in one process and take turns on its device: the weights of the idle ones are offloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from unirl.core.roles import Backend, Engine, Job, Policy, TrainReport, WeightReceipt, WeightUpdate
from unirl.core.specs.plan import Plan
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.loop.parts import Parts, shares_weights

__all__ = ["DeviceTurns", "taking_turns"]


def taking_turns(parts: Parts, plan: Plan) -> Parts:
    """The parts with at most one backend on the device, that of the model used last; the others are offloaded.

    parts: with all backends offloaded.
    """
    turns = DeviceTurns(parts.backends)
    engines = {id(engine): engine for engine in parts.engines.values()}
    for stage in plan.stages:
        if stage.learner.name in parts.backends and shares_weights(stage):
            engine = parts.engines[stage.name]
            # Stages of one model may share it.
            engines[id(engine)] = _Engine(engine, turns, stage.learner.name)
    return dataclasses.replace(
        parts,
        backends={name: _Backend(backend, turns, name) for name, backend in parts.backends.items()},
        engines={name: engines[id(engine)] for name, engine in parts.engines.items()},
    )


class DeviceTurns:
    """Which backend of a process is on its device. The switch happens on the first call that needs another one."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        """backends: by learner, all offloaded."""
        self._backends = backends
        self._holder = ""

    def take(self, learner: str) -> None:
        """Offload the backend that is on the device, and onload this one."""
        if self._holder == learner:
            return
        self.free()
        self._backends[learner].onload()
        self._holder = learner

    def free(self) -> None:
        """Offload the backend that is on the device."""
        if self._holder:
            self._backends[self._holder].offload()
            self._holder = ""


class _Backend(Backend):
    """Takes the device before its weights are used."""

    def __init__(self, inner: Backend, turns: DeviceTurns, learner: str) -> None:
        self._inner, self._turns, self._learner = inner, turns, learner

    @property
    def version(self) -> int:
        return self._inner.version

    def version_of(self, policy: Policy = "live") -> int:
        return self._inner.version_of(policy)

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        with self._here().policy(which):
            yield

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return self._here().train(jobs, progress=progress)

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        return self._here().with_reference(track, policy=policy)

    def export_weights(
        self,
        *,
        policy: Policy = "live",
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None = None,
    ) -> WeightUpdate:
        return self._here().export_weights(policy=policy, kind=kind, dtypes=dtypes)

    def adopt(self, update: WeightUpdate) -> None:
        self._here().adopt(update)

    def save(self, folder: Path) -> None:
        self._here().save(folder)

    def snapshot(self) -> Callable[[Path], None] | None:
        return self._here().snapshot()

    def load(self, folder: Path) -> None:
        self._here().load(folder)

    def end_rollout(self) -> None:
        self._here().end_rollout()

    def offload(self) -> None:
        self._turns.free()

    def onload(self) -> None:
        """Nothing yet: the first call that uses its weights takes the device."""

    def close(self) -> None:
        self._inner.close()

    def _here(self) -> Backend:
        self._turns.take(self._learner)
        return self._inner


class _Engine:
    """A `unirl.core.roles.Engine` that samples with the module of a backend, and takes the device for it."""

    def __init__(self, inner: Engine, turns: DeviceTurns, learner: str) -> None:
        self._inner, self._turns, self._learner = inner, turns, learner

    @property
    def version(self) -> int:
        return self._inner.version

    @version.setter
    def version(self, value: int) -> None:
        self._inner.version = value

    def generate(self, request: Request) -> Track:
        self._turns.take(self._learner)
        return self._inner.generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        return self._inner.load_weights(update)

    def sleep(self) -> None:
        self._inner.sleep()

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()
