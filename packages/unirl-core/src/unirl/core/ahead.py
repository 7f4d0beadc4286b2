"""Rollouts ahead of training: the next one is made on a thread of its own while this one is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .data import Prompt
from .parts import Parts, sync_weights
from .streaming import MadeRollout, Phases, RolloutMaker, step_request

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["RolloutsAhead"]


@dataclass(frozen=True, kw_only=True)
class _Begun:
    step: int
    maker: RolloutMaker
    made: Future[MadeRollout]


class RolloutsAhead:
    """One rollout at most is in the making. The engine's weights move between rollouts only, on the thread that asks.

    Left by an error or at the end, what is in the making is thrown away: its step is made again, with the newest
    weights, when a run goes on from its checkpoint.
    """

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts, self._plan = parts, plan
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._begun: _Begun | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None:
            self._begun.maker.cancel()
        # A second Ctrl-C is not to wait for a call of the engine; closing the parts ends it where they are elsewhere.
        self._thread.shutdown(wait=error is None or isinstance(error, Exception), cancel_futures=True)

    def begin(self, step: int, prompts: Sequence[Prompt], *, phases: Phases) -> None:
        """Give the engine the weights that train now, and have it make the rollout of `step` with them."""
        assert self._begun is None, f"the rollout of step {self._begun.step} was not taken"
        with phases("sync", owner=f"engine {self._plan.engine.name!r}"):
            sync_weights(self._parts, self._plan)
        with phases("request", owner=f"algorithm {self._plan.algorithm.name!r}"):
            request = step_request(self._parts, self._plan, prompts, step=step)
        maker = RolloutMaker(self._parts, self._plan, request, phases=Phases())
        self._parts.generating.acquire()
        self._begun = _Begun(step=step, maker=maker, made=self._thread.submit(self._make, maker))

    def take(self, step: int, prompts: Sequence[Prompt], *, phases: Phases) -> MadeRollout:
        """The rollout of `step`, begun before or now. Raises what making it raised."""
        if self._begun is None:
            self.begin(step, prompts, phases=phases)
        begun, self._begun = self._begun, None
        assert begun is not None
        assert begun.step == step, f"the rollout of step {begun.step} was begun, that of {step} is asked for"
        with phases("wait"):
            return begun.made.result()

    def settle(self) -> None:
        """Wait until nothing is in the making, so that the engine may be used otherwise; `take` gives it later."""
        if self._begun is not None:
            # What it raises is for the step that takes it.
            self._begun.made.exception()

    def _make(self, maker: RolloutMaker) -> MadeRollout:
        try:
            return maker.make()
        finally:
            self._parts.generating.release()
