"""Engines of texts and images that have a copy of the weights for each, and a model to try them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unirl.conformance.doubles import tiny_unified as model
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.track import Track
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

from conformance_mutants.changes import Change
from conformance_mutants.engine_copying import SPEC as COPYING
from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

ONE_SET = "two-stages-of-an-engine-share-one-set-of-weights"


class TwoCopies(CopyingEngine):
    """Texts come from an engine of their own, to which every update is handed on."""

    def __init__(self, config: Any, *, model: Any, device: Any = None) -> None:
        super().__init__(config, model=model)
        self.texts = CopyingEngine(config, model=model)

    def generate(self, request: Request) -> Track:
        return self.texts.generate(request) if isinstance(request.params, TextRequest) else super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().load_weights(update)
        self.hand_on(update)
        return receipt

    def hand_on(self, update: WeightUpdate) -> None:
        self.texts.load_weights(update)

    def sleep(self) -> None:
        super().sleep()
        self.texts.sleep()

    def wake(self) -> None:
        super().wake()
        self.texts.wake()


def version_alone(part: TwoCopies, _: Any, update: WeightUpdate) -> None:
    part.texts.version = update.version


def one_late(part: TwoCopies, hand_on: Any, update: WeightUpdate) -> None:
    """The update before this one, under its version."""
    waiting: WeightUpdate | None = vars(part).get("waiting")
    vars(part)["waiting"] = update
    if waiting is not None:
        hand_on(waiting)
    part.texts.version = update.version


def keeps_version(part: TwoCopies, hand_on: Any, update: WeightUpdate) -> None:
    before = part.texts.version
    hand_on(update)
    part.texts.version = before


def two_copies(name: str, breaks: str, change: Change) -> Mutant:
    spec = replace(COPYING, build=f"{__name__}:TwoCopies")
    return Mutant(name=name, claim=ONE_SET, breaks=breaks, spec=spec, changes={"hand_on": change})


MUTANTS = [
    two_copies("keeps-old-weights-for-texts", "syncs the copy that makes images alone", version_alone),
    two_copies("syncs-texts-late", "gives the copy that makes texts the weights of the sync before", one_late),
    two_copies("keeps-the-version-of-texts", "moves the version of images alone", keeps_version),
]
build = builder(MUTANTS)


def catalog() -> Catalog:
    healthy = plugin(models=[model.SPEC], engines=[TRAINSIDE, COPYING])
    return catalog_of(healthy, engines=specs(MUTANTS, module=__name__))
