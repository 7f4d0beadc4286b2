"""Engines that take adapters, keep them or drop them in a wrong way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.engines.trainside.engine import TrainsideEngine

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
from conformance_mutants.mutant import Mutant


class CountsAdaptersOneLess(CountsOneLess):
    kind = "lora"


class StripsPrefixesOfAdapters(StripsPrefixes):
    kind = "lora"


class SkipsUnknownLayers(SkipsUnknown):
    kind = "lora"


class SkipsMissingHalves(SkipsMissing):
    kind = "lora"


class CastsDtypesOfAdapters(CastsDtypes):
    kind = "lora"

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


class BroadcastsShapesOfAdapters(BroadcastsShapes):
    kind = "lora"

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return CopyingEngine.write_full(self, update)

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.reshape(tensor.shape[-2:]) for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


class FillsUpTruncatedAdapters(FillsUpTruncated):
    kind = "lora"

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return CopyingEngine.write_full(self, update)

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        wanted = self.wanted_pairs(update.tensors)
        whole = {
            name: torch.cat([rows, torch.zeros_like(wanted[name])[len(rows) :]])
            for name, rows in update.tensors.items()
        }
        super().add_adapter(weights, dataclasses.replace(update, tensors=whole))


class TakesEmptyAdapters(CopyingEngine):
    def check_any(self, count: int) -> None:
        """One of no layer is taken."""


class TrustsBitsOfAdapters(TrustsBits):
    kind = "lora"


class WritesLayersAsItChecks(For):
    """Adapters layer by layer, until one does not fit."""

    kind = "lora"

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        try:
            return super().load_weights(update)
        except RecipeError:
            if self.is_here:
                wanted = self.wanted_pairs(update.tensors)
                whole = {
                    name: tensor
                    for name, tensor in update.tensors.items()
                    if name in wanted and tensor.shape == wanted[name].shape
                }
                self.add_adapter(
                    dict(self._module.named_parameters()),
                    dataclasses.replace(update, tensors={name: tensor.float() for name, tensor in whole.items()}),
                )
            raise


class IsMendedByAnAdapter(BreaksOff):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.is_torn = self.is_torn and update.kind != "lora"
        return super().load_weights(update)


class ForgetsTheScale(CopyingEngine):
    def scale_of(self, update: WeightUpdate) -> float:
        return 1.0


class PilesUpAdapters(CopyingEngine):
    """The next one on the one before. A refused one changes nothing."""

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        self.add_adapter(dict(self._module.named_parameters()), update)
        return {name: tensor.clone() for name, tensor in update.tensors.items()}


class PutsAdaptersOnTheFirst(RemembersTheFirst):
    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        newest, self._base = self._base, self._first
        try:
            return super().write_adapter(update)
        finally:
            self._base = newest


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


LORA, HALF_LORA = "an-adapter-that-does-not-fit-is-refused", "a-refused-adapter-is-never-half-applied"
SCALED, NEWEST = "an-adapter-is-sampled-with-at-its-scale", "adapters-go-on-the-newest-full-weights-and-with-the-next"
MENDED = "an-adapter-does-not-mend-refused-weights"

BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: Mutant(claim=claim, name=name, broken=broken)
    for kind, claim, name, broken in (
        (
            CountsAdaptersOneLess,
            "the-receipt-of-an-adapter-is-of-what-the-engine-holds",
            "counts-adapters-one-less",
            "a wrong count in its receipt of an adapter",
        ),
        (StripsPrefixesOfAdapters, LORA, "strips-prefixes-of-adapters", "takes adapters of which it knows no name"),
        (SkipsUnknownLayers, LORA, "skips-unknown-layers", "skips layers that it does not know"),
        (SkipsMissingHalves, LORA, "skips-missing-halves", "drops a layer of which one half was sent"),
        (CastsDtypesOfAdapters, LORA, "casts-dtypes-of-adapters", "casts adapters of another dtype"),
        (BroadcastsShapesOfAdapters, LORA, "broadcasts-shapes-of-adapters", "takes adapters of another shape"),
        (FillsUpTruncatedAdapters, LORA, "fills-up-truncated-adapters", "fills adapters up that end early"),
        (TakesEmptyAdapters, LORA, "takes-empty-adapters", "takes an adapter of no layer"),
        (TrustsBitsOfAdapters, LORA, "trusts-bits-of-adapters", "does not look at an adapter's checksum"),
        (WritesLayersAsItChecks, HALF_LORA, "writes-layers-as-it-checks", "adds layers until one does not fit"),
        (
            IsMendedByAnAdapter,
            MENDED,
            "is-mended-by-an-adapter",
            "samples from half of an update with an adapter on it",
        ),
        (ForgetsTheScale, SCALED, "forgets-the-scale", "takes 1 for alpha / rank"),
        (PilesUpAdapters, SCALED, "piles-up-adapters", "adds each to the last"),
        (PutsAdaptersOnTheFirst, NEWEST, "adapters-on-the-first", "adds adapters to the weights of the checkpoint"),
        (KeepsTheAdapter, NEWEST, "keeps-the-adapter", "keeps an adapter on top of full weights that come later"),
    )
}
