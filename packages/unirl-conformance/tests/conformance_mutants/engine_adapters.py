"""Engines that take adapters, keep them or drop them in a wrong way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightReceipt, WeightUpdate

from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.engine_weights import (
    BreaksOff,
    BroadcastsShapes,
    CastsDtypes,
    CountsOneLess,
    FillsUpTruncated,
    For,
    RemembersTheFirst,
    SkipsMissing,
    SkipsUnknown,
    StripsPrefixes,
    TrustsBits,
)
from conformance_mutants.mutant import mutant, mutants_in

LORA, HALF_LORA = "an-adapter-that-does-not-fit-is-refused", "a-refused-adapter-is-never-half-applied"
SCALED, NEWEST = "an-adapter-is-sampled-with-at-its-scale", "adapters-go-on-the-newest-full-weights-and-with-the-next"
MENDED = "an-adapter-does-not-mend-refused-weights"


@mutant(
    claim="the-receipt-of-an-adapter-is-of-what-the-engine-holds", breaks="a wrong count in its receipt of an adapter"
)
class CountsAdaptersOneLess(CountsOneLess):
    kind = "lora"


@mutant(claim=LORA, breaks="takes adapters of which it knows no name")
class StripsPrefixesOfAdapters(StripsPrefixes):
    kind = "lora"


@mutant(claim=LORA, breaks="skips layers that it does not know")
class SkipsUnknownLayers(SkipsUnknown):
    kind = "lora"


@mutant(claim=LORA, breaks="drops a layer of which one half was sent")
class SkipsMissingHalves(SkipsMissing):
    kind = "lora"


@mutant(claim=LORA, breaks="casts adapters of another dtype")
class CastsDtypesOfAdapters(CastsDtypes):
    kind = "lora"

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


@mutant(claim=LORA, breaks="takes adapters of another shape")
class BroadcastsShapesOfAdapters(BroadcastsShapes):
    kind = "lora"

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return CopyingEngine.write_full(self, update)

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.reshape(tensor.shape[-2:]) for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


@mutant(claim=LORA, breaks="fills adapters up that end early")
class FillsUpTruncatedAdapters(FillsUpTruncated):
    kind = "lora"

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return CopyingEngine.write_full(self, update)

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        expected = self.wanted_pairs(update.tensors)
        whole = {
            name: torch.cat([rows, torch.zeros_like(expected[name])[len(rows) :]])
            for name, rows in update.tensors.items()
        }
        super().add_adapter(weights, dataclasses.replace(update, tensors=whole))


@mutant(claim=LORA, breaks="takes an adapter of no layer")
class TakesEmptyAdapters(CopyingEngine):
    def check_any(self, count: int) -> None:
        """One of no layer is taken."""


@mutant(claim=LORA, breaks="does not look at an adapter's checksum")
class TrustsBitsOfAdapters(TrustsBits):
    kind = "lora"


@mutant(claim=HALF_LORA, breaks="adds layers until one does not fit")
class WritesLayersAsItChecks(For):
    """Adapters layer by layer, until one does not fit."""

    kind = "lora"

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        try:
            return super().load_weights(update)
        except RecipeError:
            if self.is_here:
                expected = self.wanted_pairs(update.tensors)
                whole = {
                    name: tensor
                    for name, tensor in update.tensors.items()
                    if name in expected and tensor.shape == expected[name].shape
                }
                self.add_adapter(
                    dict(self._module.named_parameters()),
                    dataclasses.replace(update, tensors={name: tensor.float() for name, tensor in whole.items()}),
                )
            raise


@mutant(claim=MENDED, breaks="samples from half of an update with an adapter on it")
class IsMendedByAnAdapter(BreaksOff):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.is_torn = self.is_torn and update.kind != "lora"
        return super().load_weights(update)


@mutant(claim=SCALED, breaks="takes 1 for alpha / rank")
class ForgetsTheScale(CopyingEngine):
    def scale_of(self, update: WeightUpdate) -> float:
        return 1.0


@mutant(claim=SCALED, breaks="adds each to the last")
class PilesUpAdapters(CopyingEngine):
    """The next one on the one before. A refused one changes nothing."""

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        self.add_adapter(dict(self._module.named_parameters()), update)
        return {name: tensor.clone() for name, tensor in update.tensors.items()}


@mutant(claim=NEWEST, name="adapters-on-the-first", breaks="adds adapters to the weights of the checkpoint")
class PutsAdaptersOnTheFirst(RemembersTheFirst):
    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        newest, self._base = self._base, self._first
        try:
            return super().write_adapter(update)
        finally:
            self._base = newest


@mutant(claim=NEWEST, breaks="keeps an adapter on top of full weights that come later")
class KeepsTheAdapter(CopyingEngine):
    """On top of the full weights that come after it."""

    _adapter: WeightUpdate | None = None

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        self._adapter = update
        return super().write_adapter(update)

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        held = super().write_full(update)
        if self._adapter is not None:
            self.add_adapter(dict(self._module.named_parameters()), self._adapter)
        return held


BROKEN = mutants_in(__name__)
