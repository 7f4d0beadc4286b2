"""Backends whose critic is not what it should be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track

from conformance_mutants.backend_training import FULL
from conformance_mutants.backend_wrapped import Wrapped, is_enabled, with_tensors
from conformance_mutants.mutant import mutant, mutants_in

CAPS = (*FULL, Cap.CRITIC)


@mutant(
    claim="a-critic-starts-at-zero-and-trains-by-torchs-adamw",
    breaks="gives half of what the critic expects",
    promises=CAPS,
)
class HalvesTheValues(Wrapped):
    def with_values(self, track: Track) -> Track:
        track = super().with_values(track)
        values = track.text.values
        assert values is not None
        return dataclasses.replace(
            track, segment=dataclasses.replace(track.text, values=tuple(row / 2 for row in values))
        )


@mutant(claim="a-critic-stays-with-the-backend", breaks="sends a weight of the critic to engines", promises=CAPS)
class SendsTheCritic(Wrapped):
    def export_weights(self, **asked: Any) -> WeightUpdate:
        update = super().export_weights(**asked)
        if not is_enabled(self.config, Cap.CRITIC):
            return update
        return with_tensors(update, {**update.tensors, "critic.head.weight": torch.zeros(1)})


@mutant(
    claim="a-resumed-critic-is-the-uninterrupted-one",
    breaks="starts the critic anew after a checkpoint",
    promises=CAPS,
)
class ForgetsTheCritic(Wrapped):
    def load(self, folder: Path) -> None:
        super().load(folder)
        if is_enabled(self.config, Cap.CRITIC):
            self.start_anew()


@mutant(
    claim="values-without-a-critic-are-refused",
    name="no-values",
    breaks="gives a track without values where it keeps no critic",
    promises=CAPS,
)
class InventsValues(Wrapped):
    def with_values(self, track: Track) -> Track:
        try:
            return super().with_values(track)
        except RecipeError:
            return track


BROKEN = mutants_in(__name__)
