"""Algorithms that lose, on a resume, what they carry from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.plugin import FLOW_GRPO
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.plugin import SPECS
from unirl.core.roles import Forward, Losses
from unirl.core.specs.spec import AlgorithmSpec
from unirl.core.types.track import Track

from conformance_mutants.mutant import mutant, mutants_in

__all__ = ["BROKEN", "specs"]


RESUMED = "a-resumed-algorithm-goes-on-as-it-was"


@mutant(claim=RESUMED, breaks="loads no state")
class StartsAnew(FlowGrpo):
    def load_state(self, state: Mapping[str, Any]) -> None:
        """As if there had been none."""


@mutant(claim=RESUMED, breaks="takes a coefficient that is not in its state")
class SaysWhatItDoesNotUse(FlowGrpo):
    """Its loss takes a coefficient that is in no state: the one of its own last step."""

    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        self._used = config.kl_coef

    @property
    def kl_coef(self) -> float:
        return self._used

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        result = super().end_step(metrics)
        self._used = self._kl_coef
        return result


@mutant(claim=RESUMED, breaks="keeps a state, and its spec names no settings of it")
class KeepsItQuiet(FlowGrpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, kl_target=0.01) if config.kl_coef else config, **context)


@mutant(claim=RESUMED, breaks="changes its state with every micro-batch")
class AdaptsWithEachUpdate(Grpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        if self.state():
            self._kl_coef *= 1.01
        return super().loss(track, forward, progress=progress)


BROKEN = mutants_in(__name__)


def build(config: Any, *, seed: int, **context: Any) -> Any:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, **context)


def specs() -> list[AlgorithmSpec]:
    return [_spec(kind) for kind in BROKEN]


def _spec(kind: type[Any]) -> AlgorithmSpec:
    of = SPECS[0] if issubclass(kind, Grpo) else FLOW_GRPO
    spec = dataclasses.replace(of, name=BROKEN[kind].name, build=f"{__name__}:build")
    return dataclasses.replace(spec, stateful={}) if kind is KeepsItQuiet else spec
