"""Backends whose critic is not what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.capability import Cap
from unirl.core.errors import RecipeError
from unirl.core.track import Track

from conformance_mutants.backend_training import FULL
from conformance_mutants.mutant import Mutant


class TrainsTheOutputAlone(Fsdp2Backend):
    def __init__(self, config: Any, **of: Any) -> None:
        super().__init__(config, **of)
        if self._critic is not None:
            for name in [name for name in self._critic.optimizer.params if name.startswith("trunk.")]:
                self._critic.optimizer.params[name].requires_grad_(False)


class SendsTheCritic(Fsdp2Backend):
    def _exported(self, kind: str, *, is_on: bool) -> dict[str, Tensor]:
        found = super()._exported(kind, is_on=is_on)
        if self._critic is not None:
            found["critic.head.weight"] = self._critic.net.head.weight.detach().clone()
        return found


class ForgetsTheMomentsOfTheCritic(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        super().load(folder)
        if self._critic is not None:
            self._critic.optimizer.adam.state.clear()


class InventsValues(Fsdp2Backend):
    def with_values(self, track: Track) -> Track:
        try:
            return super().with_values(track)
        except RecipeError:
            return track


CAPS = (*FULL, Cap.CRITIC)
BROKEN = {
    TrainsTheOutputAlone: (
        Mutant(
            claim="a-critic-starts-at-zero-and-trains-by-torchs-adamw",
            name="output-alone",
            broken="trains the output of the critic and not its trunk",
        ),
        CAPS,
    ),
    SendsTheCritic: (
        Mutant(
            claim="a-critic-stays-with-the-backend",
            name="sends-the-critic",
            broken="sends a weight of the critic to engines",
        ),
        CAPS,
    ),
    ForgetsTheMomentsOfTheCritic: (
        Mutant(
            claim="a-resumed-critic-is-the-uninterrupted-one",
            name="critic-without-moments",
            broken="starts the critic's moments anew after a checkpoint",
        ),
        CAPS,
    ),
    InventsValues: (
        Mutant(
            claim="values-without-a-critic-are-refused",
            name="no-values",
            broken="gives a track without values where it keeps no critic",
        ),
        CAPS,
    ),
}
