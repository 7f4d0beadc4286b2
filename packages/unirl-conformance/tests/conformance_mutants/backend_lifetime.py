"""Backends that lose something between two steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.capability import Cap
from unirl.core.errors import CheckpointError
from unirl.core.roles import WeightUpdate

from conformance_mutants.backend_training import FULL
from conformance_mutants.mutant import Mutant

FOREIGN = ("belongs to another set-up", "was made with")


class ForgetsMoments(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self._optimizer.adam.state.clear()


class ForgetsTheAverage(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        averages = self._averages()
        kept = {name: {key: value.clone() for key, value in averages[name].values.items()} for name in averages}
        super().load(folder)
        for name, values in kept.items():
            averages[name].values = values


class GoesOnWithoutDamagedFiles(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        try:
            super().load(folder)
        except CheckpointError as error:
            if any(words in str(error) for words in FOREIGN):
                raise


class GoesOnWithoutForeignWeights(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        try:
            super().load(folder)
        except CheckpointError as error:
            if not any(words in str(error) for words in FOREIGN):
                raise


class DropsMomentsOnTheWay(Fsdp2Backend):
    def onload(self) -> None:
        super().onload()
        self._optimizer.adam.state.clear()


class ClosesOnce(Fsdp2Backend):
    def close(self) -> None:
        super().close()
        del self._ranks


class AdoptsWithoutVersion(Fsdp2Backend):
    def adopt(self, update: WeightUpdate) -> None:
        super().adopt(dataclasses.replace(update, version=self.version))


class AdoptsWhatItKnows(Fsdp2Backend):
    def adopt(self, update: WeightUpdate) -> None:
        held = self.weights(kind=update.kind).tensors
        known = {name: value for name, value in update.tensors.items() if name in held}
        super().adopt(dataclasses.replace(update, tensors={**held, **known}))


BROKEN: dict[type[Fsdp2Backend], tuple[Mutant, tuple[Cap, ...]]] = {
    ForgetsMoments: (
        Mutant(
            claim="a-resumed-training-is-the-uninterrupted-one",
            name="forgets-moments",
            broken="starts the optimizer anew after loading",
        ),
        FULL,
    ),
    ForgetsTheAverage: (
        Mutant(
            claim="a-resumed-training-is-the-uninterrupted-one",
            name="forgets-the-average",
            broken="does not load the average",
        ),
        (*FULL, Cap.EMA),
    ),
    GoesOnWithoutDamagedFiles: (
        Mutant(
            claim="a-damaged-checkpoint-is-refused-and-changes-nothing",
            name="goes-on-without-files",
            broken="loads nothing from a damaged checkpoint, in silence",
        ),
        FULL,
    ),
    GoesOnWithoutForeignWeights: (
        Mutant(
            claim="a-foreign-checkpoint-is-refused-and-changes-nothing",
            name="goes-on-without-weights",
            broken="loads nothing from a foreign checkpoint, in silence",
        ),
        FULL,
    ),
    DropsMomentsOnTheWay: (
        Mutant(
            claim="offload-and-onload-keep-every-number",
            name="drops-moments",
            broken="starts the optimizer anew after onload",
        ),
        FULL,
    ),
    AdoptsWithoutVersion: (
        Mutant(
            claim="adopted-weights-compute-what-the-trainer-computes",
            name="adopts-without-version",
            broken="keeps its own version when it takes weights over",
        ),
        FULL,
    ),
    AdoptsWhatItKnows: (
        Mutant(
            claim="weights-that-do-not-fit-are-not-adopted",
            name="adopts-what-it-knows",
            broken="takes over the tensors whose names it knows, and no others",
        ),
        FULL,
    ),
    ClosesOnce: (
        Mutant(claim="a-backend-may-be-closed-twice", name="closes-once", broken="fails when it is closed again"),
        FULL,
    ),
}
