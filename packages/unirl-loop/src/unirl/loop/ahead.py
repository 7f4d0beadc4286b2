"""Rollouts ahead of training: the next ones are generated on a separate thread while this one is trained on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from unirl.core.data.prompts import StepPrompts

from .parts import Parts, attributed, kept_weights, sync_weights
from .requests import step_requests
from .streaming import MadeRollout, Phases, RolloutMaker

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = ["RolloutsAhead"]


@dataclass(frozen=True, kw_only=True)
class _Begun:
    step: int
    versions: dict[str, int]
    """Of the weights that each stage is made with."""
    maker: RolloutMaker
    made: Future[MadeRollout]


class RolloutsAhead:
    """In-flight and queued rollouts, generated one after the other, in the order of their steps.

    Each is made with the weights that trained when it was begun. The engine's weights move between rollouts only: on
    the thread that begins one while the engine is idle, else on the thread that makes them, from a copy.

    Left by an error or at the end, what is not taken is thrown away: those steps are made again, with the newest
    weights, when a run goes on from its checkpoint.
    """

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts, self._plan = parts, plan
        self._engine = " or ".join(dict.fromkeys(f"engine {stage.engine.name!r}" for stage in plan.stages))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._begun: deque[_Begun] = deque()
        self._is_over = threading.Event()
        """Nothing more is made: a rollout failed, or the others are not wanted."""
        self._counting = threading.Lock()
        self._unmade = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for begun in self._begun:
            begun.maker.cancel()
            if begun.made.cancel():
                self._count(-1)
        # A second Ctrl-C is not to wait for a call of the engine; closing the parts ends it where they are elsewhere.
        self._thread.shutdown(wait=error is None or isinstance(error, Exception))

    @property
    def num_waiting(self) -> int:
        """Rollouts that are made and not taken."""
        return sum(begun.made.done() for begun in self._begun)

    def begin(self, step: int, prompts: StepPrompts, *, phases: Phases) -> None:
        """Have the engine make the rollout of `step`, after those begun before, with the weights that train now."""
        assert not self._begun or step == self._begun[-1].step + 1, f"step {step} does not follow those begun"
        with phases("sync", owner=self._engine):
            bring = self._weights()
        with phases("request", owner="the sampling of a stage"):
            requests = step_requests(self._parts, self._plan, prompts.chosen, step=step)
        maker = RolloutMaker(self._parts, self._plan, requests, phases=Phases(), spare=prompts.spare)
        self._count(+1)
        made = self._thread.submit(self._make, maker, bring)
        self._begun.append(_Begun(step=step, versions=self._versions, maker=maker, made=made))

    def begin_after(self, step: int, following: Sequence[StepPrompts], *, phases: Phases) -> None:
        """Begin the rollouts of the steps after `step` that are not begun yet.

        following: prompts of step + 1, step + 2 and so on.
        """
        newest = self._begun[-1].step if self._begun else step
        for number, prompts in enumerate(following, start=step + 1):
            if number > newest:
                self.begin(number, prompts, phases=phases)

    def take(self, step: int, prompts: StepPrompts, *, phases: Phases) -> MadeRollout:
        """The rollout of `step`, begun before or now. Raises what making it raised."""
        if not self._begun:
            self.begin(step, prompts, phases=phases)
        oldest = self._begun[0]
        assert oldest.step == step, f"the rollout of step {oldest.step} was begun, that of {step} is asked for"
        with phases("wait"):
            made = oldest.made.result()
        self._begun.popleft()
        return made

    def settle(self) -> None:
        """Wait until nothing is in the making, so that the engine may be used otherwise; `take` gives it later."""
        # What they raise is for the steps that take them.
        wait([begun.made for begun in self._begun])

    def _weights(self) -> list[Callable[[], None]]:
        """Give the engines the weights that train now; what does so later, while they have rollouts to make before."""
        if self._is_busy:
            before = self._begun[-1].versions
            moved = [stage for stage in self._plan.stages if before[stage.name] != self._versions[stage.name]]
            if not moved:
                return []
            if self._parts.sync is None:
                return [kept_weights(self._parts, stage) for stage in moved]
            self.settle()
        if not self._is_over.is_set():
            sync_weights(self._parts, self._plan)
        return []

    @property
    def _versions(self) -> dict[str, int]:
        """Of the weights that a rollout begun now is made with."""
        return {stage.name: self._parts.version(stage) for stage in self._plan.stages}

    @property
    def _is_busy(self) -> bool:
        with self._counting:
            return self._unmade > 0

    def _make(self, maker: RolloutMaker, bring: Sequence[Callable[[], None]]) -> MadeRollout:
        try:
            if self._is_over.is_set():
                raise CancelledError
            with attributed(self._engine, phase="sync"):
                for one in bring:
                    one()
            return maker.make()
        except BaseException:
            self._is_over.set()
            raise
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Rollouts to be made, one more or less; while there is one, the weights move by `_make` alone."""
        with self._counting:
            was, self._unmade = self._unmade, self._unmade + change
            if not was:
                self._parts.generating.acquire()
            elif not self._unmade:
                self._parts.generating.release()
