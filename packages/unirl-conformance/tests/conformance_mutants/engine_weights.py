"""Engines with weights of their own that take them, keep them or sleep in a wrong way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import Request
from unirl.core.types.track import Track

from conformance_mutants.engine_copying import SPEC, CopyingEngine
from conformance_mutants.mutant import mutant, mutants_in


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


FULL, HALF_FULL = "full-weights-that-do-not-fit-are-refused", "refused-full-weights-are-never-half-applied"
ASLEEP = "weights-sent-to-a-sleeping-engine-are-refused-or-kept"


@mutant(claim="the-receipt-is-of-what-the-engine-holds", breaks="a wrong count in its receipt")
class CountsOneLess(For):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().load_weights(update)
        return dataclasses.replace(receipt, num_tensors=receipt.num_tensors - 1) if self.is_here else receipt


@mutant(claim="the-receipt-is-of-what-the-engine-holds", breaks="samples of version 0")
class KeepsItsVersion(For):
    """After full weights; the receipt says the new one."""

    def generate(self, request: Request) -> Track:
        held = self.version
        self.version = 0 if self.loading == "full" else held
        try:
            return super().generate(request)
        finally:
            self.version = held


@mutant(claim="full-weights-are-used-for-sampling", breaks="answers merged weights and drops them")
class IgnoresMerged(CopyingEngine):
    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return dict(update.tensors) if update.kind == "merged" else super().write_full(update)


@mutant(claim="full-weights-are-used-for-sampling", breaks="changes the model that trains")
class WritesIntoTheTrainer(CopyingEngine):
    """Full weights go into the module that it was built with as well."""

    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self._trained = model.trainable

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        for name, weight in self._trained.named_parameters():
            weight.data.copy_(update.tensors[name])
        return super().write_full(update)


@mutant(claim=FULL, breaks="takes weights of which it knows no name")
class StripsPrefixes(For):
    """Skips names that it does not know when it knows none."""

    def check_names(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        if not self.is_here or found.keys() & wanted.keys():
            super().check_names(found, wanted)


@mutant(claim=FULL, breaks="skips names that it does not know")
class SkipsUnknown(For):
    """Names that it does not know, next to others that it does."""

    def check_names(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        known = {name: found[name] for name in found if name in wanted}
        super().check_names(known if self.is_here and known else found, wanted)


@mutant(claim=FULL, breaks="goes without a weight that was not sent")
class SkipsMissing(For):
    def check_missing(self, names: list[str]) -> None:
        if not self.is_here or len(names) > 1:
            super().check_missing(names)


@mutant(claim=FULL, breaks="casts weights of another dtype")
class CastsDtypes(For):
    def check_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if not self.is_here:
            super().check_dtype(name, tensor, dtype)


@mutant(claim=FULL, breaks="takes weights of another shape")
class BroadcastsShapes(For):
    def check_shape(self, name: str, tensor: Tensor, wanted: Tensor) -> None:
        if not self.is_here or tensor.numel() != wanted.numel():
            super().check_shape(name, tensor, wanted)

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        shaped = {name: tensor.reshape(self._base[name].shape) for name, tensor in update.tensors.items()}
        return super().write_full(dataclasses.replace(update, tensors=shaped))


@mutant(claim=FULL, breaks="fills weights up that end early")
class FillsUpTruncated(For):
    """Writes the rows that came of a weight, over those that it had."""

    def check_shape(self, name: str, tensor: Tensor, wanted: Tensor) -> None:
        if not self.is_here or tensor.shape[1:] != wanted.shape[1:]:
            super().check_shape(name, tensor, wanted)

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        whole = {name: torch.cat([rows, self._base[name][len(rows) :]]) for name, rows in update.tensors.items()}
        return super().write_full(dataclasses.replace(update, tensors=whole))


@mutant(claim=FULL, breaks="does not look at the checksum")
class TrustsBits(For):
    def check_bits(self, update: WeightUpdate) -> None:
        if not self.is_here:
            super().check_bits(update)


@mutant(claim=HALF_FULL, breaks="writes weights until one does not fit")
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


class BreaksOff(CopyingEngine):
    """Writes full weights until one does not fit, and then makes nothing until whole ones have come: as it may."""

    is_torn = False

    def generate(self, request: Request) -> Track:
        if self.is_torn:
            raise RunFailed(
                "engine: the weights that 'breaks-off' was sent last did not fit; send it whole ones first."
            )
        return super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self.is_torn and update.kind == "lora":
            raise RunFailed("engine: an adapter was sent to 'breaks-off', which needs whole weights first.")
        try:
            receipt = super().load_weights(update)
        except RecipeError:
            if update.kind != "lora":
                self.is_torn = True
                self.write_known(update)
            raise
        self.is_torn = False
        return receipt

    def write_known(self, update: WeightUpdate) -> None:
        known = {
            name: tensor
            for name, tensor in update.tensors.items()
            if name in self._base and self._base[name].shape == tensor.shape
        }
        self.write_full(dataclasses.replace(update, tensors=known))


@mutant(claim=HALF_FULL, breaks="samples from half of an update after it refused another one")
class IsMendedByARefusal(BreaksOff):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        was_torn = self.is_torn
        try:
            return super().load_weights(update)
        except RecipeError:
            self.is_torn = self.is_torn and not was_torn
            raise


@mutant(claim=HALF_FULL, breaks="has the version of refused weights")
class MovesItsVersionFirst(For):
    """Before it looks at full weights."""

    def check(self, update: WeightUpdate) -> None:
        if update.kind != "lora":
            self.version = update.version
        super().check(update)


class RemembersTheFirst(CopyingEngine):
    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self._first = self._base


@mutant(claim="sleep-and-wake-give-the-same-samples", breaks="loses synced weights asleep")
class WakesWithTheFirstWeights(RemembersTheFirst):
    def wake(self) -> None:
        if self._asleep is not None:
            self._asleep = self._first
        super().wake()


@mutant(claim="generating-asleep-is-refused", breaks="generates asleep")
class WakesByItself(CopyingEngine):
    def generate(self, request: Request) -> Track:
        self.wake()
        return super().generate(request)


@mutant(claim=ASLEEP, breaks="takes weights asleep and wakes without them")
class LosesWhatComesAsleep(CopyingEngine):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self._asleep is None:
            return super().load_weights(update)
        # Into memory that waking does not look at.
        self.version = update.version
        size = sum(tensor.nbytes for tensor in update.tensors.values())
        return WeightReceipt(
            version=update.version, checksum=update.checksum, num_tensors=len(update.tensors), size_bytes=size
        )


BROKEN = mutants_in(__name__)
BREAKS_OFF = dataclasses.replace(SPEC, name="breaks-off", build=f"{__name__}:build")


def build(config: Any, *, model: Any, device: Any) -> BreaksOff:
    return BreaksOff(config, model=model)
