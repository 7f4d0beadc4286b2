"""Backends that lose something between two steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.core.errors import CheckpointError
from unirl.core.roles import WeightUpdate
from unirl.core.specs.capability import Cap

from conformance_mutants.backend_training import FULL
from conformance_mutants.backend_wrapped import Wrapped, is_enabled
from conformance_mutants.mutant import mutant, mutants_in

FOREIGN = ("belongs to another set-up", "was made with")


@mutant(
    claim="a-resumed-training-is-the-uninterrupted-one", breaks="starts the optimizer anew after loading", promises=FULL
)
class ForgetsMoments(Wrapped):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self.start_anew()


@mutant(
    claim="a-resumed-training-is-the-uninterrupted-one", breaks="does not load the average", promises=(*FULL, Cap.EMA)
)
class ForgetsTheAverage(Wrapped):
    def load(self, folder: Path) -> None:
        before = {}
        if is_enabled(self.config, Cap.EMA):
            before = dict(self.inner.export_weights(policy="ema", kind="full").tensors)
        super().load(folder)
        if before:
            self.kept["ema"] = before


@mutant(
    claim="a-damaged-checkpoint-is-refused-and-changes-nothing",
    name="goes-on-without-files",
    breaks="loads nothing from a damaged checkpoint, in silence",
    promises=FULL,
)
class GoesOnWithoutDamagedFiles(Wrapped):
    def load(self, folder: Path) -> None:
        try:
            super().load(folder)
        except CheckpointError as error:
            if any(words in str(error) for words in FOREIGN):
                raise


@mutant(
    claim="a-foreign-checkpoint-is-refused-and-changes-nothing",
    name="goes-on-without-weights",
    breaks="loads nothing from a foreign checkpoint, in silence",
    promises=FULL,
)
class GoesOnWithoutForeignWeights(Wrapped):
    def load(self, folder: Path) -> None:
        try:
            super().load(folder)
        except CheckpointError as error:
            if not any(words in str(error) for words in FOREIGN):
                raise


@mutant(
    claim="offload-and-onload-keep-every-number",
    name="drops-moments",
    breaks="starts the optimizer anew after onload",
    promises=FULL,
)
class DropsMomentsOnTheWay(Wrapped):
    def onload(self) -> None:
        super().onload()
        self.start_anew()


@mutant(claim="a-backend-may-be-closed-twice", breaks="fails when it is closed again", promises=FULL)
class ClosesOnce(Wrapped):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("it is closed already")
        super().close()
        self.is_closed = True


@mutant(
    claim="adopted-weights-compute-what-the-trainer-computes",
    breaks="keeps its own version when it takes weights over",
    promises=FULL,
)
class AdoptsWithoutVersion(Wrapped):
    def adopt(self, update: WeightUpdate) -> None:
        super().adopt(dataclasses.replace(update, version=self.version))


@mutant(
    claim="weights-that-do-not-fit-are-not-adopted",
    breaks="takes over the tensors whose names it knows, and no others",
    promises=FULL,
)
class AdoptsWhatItKnows(Wrapped):
    def adopt(self, update: WeightUpdate) -> None:
        held = self.export_weights(kind=update.kind).tensors
        known = {name: value for name, value in update.tensors.items() if name in held}
        super().adopt(dataclasses.replace(update, tensors={**held, **known}))


BROKEN = mutants_in(__name__)
