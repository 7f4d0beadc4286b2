"""Engines with weights of their own that take them, keep them or sleep in a wrong way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.request import Request
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.rollout import Rollout
from unirl.engines.trainside.engine import TrainsideEngine

from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.mutant import Mutant


class For(CopyingEngine):
    """A base for what is wrong with one kind of update only."""

    kind = "full"
    loading = ""

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.loading = update.kind
        return super().load_weights(update)

    @property
    def is_here(self) -> bool:
        return (self.loading == "lora") == (self.kind == "lora")


class CountsOneLess(For):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().load_weights(update)
        return dataclasses.replace(receipt, num_tensors=receipt.num_tensors - 1) if self.is_here else receipt


class CountsAdaptersOneLess(CountsOneLess):
    kind = "lora"


class KeepsItsVersion(For):
    """After full weights; the receipt says the new one."""

    def generate(self, request: Request) -> Rollout:
        held = self.version
        self.version = 0 if self.loading == "full" else held
        try:
            return super().generate(request)
        finally:
            self.version = held


class IgnoresMerged(CopyingEngine):
    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return dict(update.tensors) if update.kind == "merged" else super().write_full(update)


class WritesIntoTheTrainer(CopyingEngine):
    """Full weights go into the module that it was built with as well."""

    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self._trained = model.trainable

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        for name, weight in self._trained.named_parameters():
            weight.data.copy_(update.tensors[name])
        return super().write_full(update)


class StripsPrefixes(For):
    """Skips names that it does not know when it knows none."""

    def check_names(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        if not self.is_here or found.keys() & wanted.keys():
            super().check_names(found, wanted)


class StripsPrefixesOfAdapters(StripsPrefixes):
    kind = "lora"


class SkipsUnknown(For):
    """Names that it does not know, next to others that it does."""

    def check_names(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        known = {name: found[name] for name in found if name in wanted}
        super().check_names(known if self.is_here and known else found, wanted)


class SkipsUnknownLayers(SkipsUnknown):
    kind = "lora"


class SkipsMissing(For):
    def check_missing(self, names: list[str]) -> None:
        if not self.is_here or len(names) > 1:
            super().check_missing(names)


class SkipsMissingHalves(SkipsMissing):
    kind = "lora"


class CastsDtypes(For):
    def check_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if not self.is_here:
            super().check_dtype(name, tensor, dtype)


class CastsDtypesOfAdapters(CastsDtypes):
    kind = "lora"

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


class BroadcastsShapes(For):
    def check_shape(self, name: str, tensor: Tensor, wanted: Tensor) -> None:
        if not self.is_here:
            super().check_shape(name, tensor, wanted)

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        shaped = {name: tensor.reshape(self._base[name].shape) for name, tensor in update.tensors.items()}
        return super().write_full(dataclasses.replace(update, tensors=shaped))


class BroadcastsShapesOfAdapters(BroadcastsShapes):
    kind = "lora"

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return CopyingEngine.write_full(self, update)

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        tensors = {name: tensor.reshape(tensor.shape[-2:]) for name, tensor in update.tensors.items()}
        super().add_adapter(weights, dataclasses.replace(update, tensors=tensors))


class TrustsBits(For):
    def check_bits(self, update: WeightUpdate) -> None:
        if not self.is_here:
            super().check_bits(update)


class TrustsBitsOfAdapters(TrustsBits):
    kind = "lora"


class WritesAsItChecks(For):
    """Full weights one by one, until one does not fit."""

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        try:
            return super().load_weights(update)
        except RecipeError:
            weights = dict(self._module.named_parameters())
            for name, tensor in update.tensors.items():
                if self.is_here and name in weights and weights[name].shape == tensor.shape:
                    weights[name].data.copy_(tensor)
            raise


class WritesLayersAsItChecks(For):
    """Adapters layer by layer, until one does not fit."""

    kind = "lora"

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        try:
            return super().load_weights(update)
        except RecipeError:
            if self.is_here:
                whole = {name: tensor for name, tensor in update.tensors.items() if tensor.ndim == 2}
                self.add_adapter(
                    dict(self._module.named_parameters()),
                    dataclasses.replace(update, tensors={name: tensor.float() for name, tensor in whole.items()}),
                )
            raise


class MovesItsVersionFirst(For):
    """Before it looks at full weights."""

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        if update.kind != "lora":
            self.version = update.version
        return super().load_weights(update)


class ForgetsTheScale(CopyingEngine):
    def scale_of(self, update: WeightUpdate) -> float:
        return 1.0


class PilesUpAdapters(CopyingEngine):
    """The next one on the one before. A refused one changes nothing."""

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        self.add_adapter(dict(self._module.named_parameters()), update)
        return {name: tensor.clone() for name, tensor in update.tensors.items()}


class WakesWithTheFirstWeights(CopyingEngine):
    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self._first = {name: weight.detach().clone() for name, weight in self._module.named_parameters()}

    def wake(self) -> None:
        if self._asleep is not None:
            self._asleep = self._first
        super().wake()


class WakesByItself(CopyingEngine):
    def generate(self, request: Request) -> Rollout:
        self.wake()
        return super().generate(request)


FULL, LORA = "full-weights-that-do-not-fit-are-refused", "an-adapter-that-does-not-fit-is-refused"
HALF_FULL, HALF_LORA = "refused-full-weights-are-never-half-applied", "a-refused-adapter-is-never-half-applied"

BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: Mutant(claim=claim, name=name, broken=broken)
    for kind, claim, name, broken in (
        (CountsOneLess, "the-receipt-is-of-what-the-engine-holds", "counts-one-less", "a wrong count in its receipt"),
        (KeepsItsVersion, "the-receipt-is-of-what-the-engine-holds", "keeps-its-version", "samples of version 0"),
        (
            CountsAdaptersOneLess,
            "the-receipt-of-an-adapter-is-of-what-the-engine-holds",
            "counts-adapters-one-less",
            "a wrong count in its receipt of an adapter",
        ),
        (IgnoresMerged, "full-weights-are-sampled-from", "ignores-merged", "answers merged weights and drops them"),
        (
            WritesIntoTheTrainer,
            "full-weights-are-sampled-from",
            "writes-into-the-trainer",
            "changes the model that trains",
        ),
        (StripsPrefixes, FULL, "strips-prefixes", "takes weights of which it knows no name"),
        (SkipsUnknown, FULL, "skips-unknown", "skips names that it does not know"),
        (SkipsMissing, FULL, "skips-missing", "goes without a weight that was not sent"),
        (CastsDtypes, FULL, "casts-dtypes", "casts weights of another dtype"),
        (BroadcastsShapes, FULL, "broadcasts-shapes", "takes weights of another shape"),
        (TrustsBits, FULL, "trusts-bits", "does not look at the checksum"),
        (StripsPrefixesOfAdapters, LORA, "strips-prefixes-of-adapters", "takes adapters of which it knows no name"),
        (SkipsUnknownLayers, LORA, "skips-unknown-layers", "skips layers that it does not know"),
        (SkipsMissingHalves, LORA, "skips-missing-halves", "drops a layer of which one half was sent"),
        (CastsDtypesOfAdapters, LORA, "casts-dtypes-of-adapters", "casts adapters of another dtype"),
        (BroadcastsShapesOfAdapters, LORA, "broadcasts-shapes-of-adapters", "takes adapters of another shape"),
        (TrustsBitsOfAdapters, LORA, "trusts-bits-of-adapters", "does not look at an adapter's checksum"),
        (WritesAsItChecks, HALF_FULL, "writes-as-it-checks", "writes weights until one does not fit"),
        (MovesItsVersionFirst, HALF_FULL, "moves-its-version-first", "has the version of refused weights"),
        (WritesLayersAsItChecks, HALF_LORA, "writes-layers-as-it-checks", "adds layers until one does not fit"),
        (ForgetsTheScale, "an-adapter-is-sampled-with-at-its-scale", "forgets-the-scale", "takes 1 for alpha / rank"),
        (PilesUpAdapters, "an-adapter-is-sampled-with-at-its-scale", "piles-up-adapters", "adds each to the last"),
        (
            WakesWithTheFirstWeights,
            "sleep-and-wake-give-the-same-samples",
            "wakes-with-the-first-weights",
            "loses synced weights asleep",
        ),
        (WakesByItself, "generating-asleep-is-refused", "wakes-by-itself", "generates asleep"),
    )
}
