"""Engines with separate weights that take full weights or adapters, keep them or sleep in a wrong way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.track import Track

from conformance_mutants.changes import Change, first, skipped
from conformance_mutants.engine_copying import SPEC, CopyingEngine
from conformance_mutants.mutant import Mutant

FULL, HALF_FULL = "full-weights-that-do-not-fit-are-refused", "refused-full-weights-are-never-half-applied"
LORA, HALF_LORA = "an-adapter-that-does-not-fit-is-refused", "a-refused-adapter-is-never-half-applied"
USED, RECEIPT = "full-weights-are-used-for-sampling", "the-receipt-is-of-what-the-engine-holds"
SCALED, NEWEST = "an-adapter-is-sampled-with-at-its-scale", "adapters-go-on-the-newest-full-weights-and-with-the-next"
MENDED = "an-adapter-does-not-mend-refused-weights"
SLEEP, ASLEEP = "sleep-and-wake-give-the-same-samples", "weights-sent-to-a-sleeping-engine-are-refused-or-kept"
LEFT_OUT = (Cap.CONDITIONS, Cap.LOG_PROBS_GAUSSIAN, Cap.SDE_STEPS_PER_GROUP, Cap.SIGMAS, Cap.TEXT_ROLLOUT)
WEIGHTS = replace(SPEC, kernels=("flow-sde",), capabilities=SPEC.capabilities - {*LEFT_OUT})
"""Fewer kinds of rollouts, for mutants with wrong weights."""


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
                self.write_full(replace(update, tensors=fitting(update.tensors, self._base)))
            raise
        self.is_torn = False
        return receipt


BREAKS_OFF = replace(SPEC, name="breaks-off", build=f"{__name__}:BreaksOff")


def weights(
    name: str, claim: str, breaks: str, changes: Mapping[str, Change], *, build: str = "", **more: Any
) -> Mutant:
    spec = replace(WEIGHTS, build=build or WEIGHTS.build)
    return Mutant(name=name, claim=claim, breaks=breaks, spec=spec, changes=changes, **more)


def full(change: Change) -> Change:
    """The change, for full and merged weights only. The method gets the update first."""
    return lambda part, method, update, *rest: (
        method(update, *rest) if update.kind == "lora" else change(part, method, update, *rest)
    )


def lora(change: Change) -> Change:
    """The change, for adapters only. The method gets the update first."""
    return lambda part, method, update, *rest: (
        change(part, method, update, *rest) if update.kind == "lora" else method(update, *rest)
    )


def fitting(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if name in expected and one.shape == expected[name].shape}


def params(part: CopyingEngine) -> dict[str, Tensor]:
    return dict(part._module.named_parameters())


def one_less(_: Any, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    receipt = load_weights(update)
    return replace(receipt, num_tensors=receipt.num_tensors - 1)


def any_known(_: Any, check: Any, update: WeightUpdate, expected: Mapping[str, Tensor], names: list[str]) -> None:
    """Skips names that it does not know when it knows none."""
    if any(name in expected for name in names):
        check(update, expected, names)


def known_alone(_: Any, check: Any, update: WeightUpdate, expected: Mapping[str, Tensor], names: list[str]) -> None:
    """Skips names that it does not know next to others that it does."""
    check(update, expected, [name for name in names if name in expected] or names)


def several_missing(_: Any, check: Any, update: WeightUpdate, names: list[str]) -> None:
    if len(names) > 1:
        check(update, names)


def numbers_alone(_: Any, check: Any, update: WeightUpdate, sent: Tensor, expected: Tensor, name: str) -> None:
    if sent.numel() != expected.numel():
        check(update, sent, expected, name)


def all_but_rows(_: Any, check: Any, update: WeightUpdate, sent: Tensor, expected: Tensor, name: str) -> None:
    if sent.shape[1:] != expected.shape[1:]:
        check(update, sent, expected, name)


def reshaped(update: WeightUpdate, expected: Mapping[str, Tensor]) -> WeightUpdate:
    tensors = {name: one.reshape(expected[name].shape) for name, one in update.tensors.items()}
    return replace(update, tensors=tensors)


def filled_up(update: WeightUpdate, held: Mapping[str, Tensor]) -> WeightUpdate:
    """The update, with the last rows of `held` where a tensor ends early."""
    tensors = {name: torch.cat([rows, held[name][len(rows) :]]) for name, rows in update.tensors.items()}
    return replace(update, tensors=tensors)


def empty_pairs(part: CopyingEngine, update: WeightUpdate) -> dict[str, Tensor]:
    return {name: torch.zeros_like(pair) for name, pair in part.wanted_pairs(update.tensors).items()}


def as_floats(update: WeightUpdate) -> WeightUpdate:
    return replace(update, tensors={name: one.float() for name, one in update.tensors.items()})


def keeps_its_version(part: CopyingEngine, generate: Any, request: Request) -> Track:
    """Only after full weights; the receipt has the new version."""
    held = part.version
    part.version = 0 if vars(part).get("loaded") == "full" else held
    try:
        return generate(request)
    finally:
        part.version = held


class WritesIntoTheTrainer(CopyingEngine):
    """Full weights go into the module that it was built with as well."""

    def __init__(self, config: Any, *, model: Any, device: Any) -> None:
        super().__init__(config, model=model)
        self._trained = model.trainable

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        for name, weight in self._trained.named_parameters():
            weight.data.copy_(update.tensors[name])
        return super().write_full(update)


def writes_as_it_checks(part: CopyingEngine, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    """Full weights one by one, until one does not fit."""
    try:
        return load_weights(update)
    except RecipeError:
        held = params(part)
        for name, tensor in fitting(update.tensors, held).items():
            held[name].data.copy_(tensor)
        raise


def adds_as_it_checks(part: CopyingEngine, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    """Adapters layer by layer, until one does not fit."""
    try:
        return load_weights(update)
    except RecipeError:
        whole = fitting(update.tensors, part.wanted_pairs(update.tensors))
        part.add_adapter(params(part), as_floats(replace(update, tensors=whole)))
        raise


def mended_by_refusal(part: BreaksOff, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    was_torn = part.is_torn
    try:
        return load_weights(update)
    except RecipeError:
        part.is_torn = part.is_torn and not was_torn
        raise


def wakes_with_first(part: CopyingEngine, wake: Any) -> None:
    if part._asleep is not None:
        part._asleep = part.first
    wake()


def loses_what_comes_asleep(part: CopyingEngine, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    """Into memory that waking does not look at."""
    if part._asleep is None:
        return load_weights(update)
    part.version = update.version
    size = sum(tensor.nbytes for tensor in update.tensors.values())
    return WeightReceipt(
        version=update.version, checksum=update.checksum, num_tensors=len(update.tensors), size_bytes=size
    )


def piles_up(part: CopyingEngine, _: Any, update: WeightUpdate) -> dict[str, Tensor]:
    part.add_adapter(params(part), update)
    return {name: tensor.clone() for name, tensor in update.tensors.items()}


def adds_to_the_first(part: CopyingEngine, write_adapter: Any, update: WeightUpdate) -> dict[str, Tensor]:
    newest, part._base = part._base, part.first
    try:
        return write_adapter(update)
    finally:
        part._base = newest


def adds_kept_adapter(part: CopyingEngine, write_full: Any, update: WeightUpdate) -> dict[str, Tensor]:
    held = write_full(update)
    if "adapter" in vars(part):
        part.add_adapter(params(part), part.adapter)
    return held


# fmt: off
MUTANTS = [
    weights("counts-one-less", RECEIPT, "gives a wrong count in its receipt", {"load_weights": full(one_less)}),
    weights("keeps-its-version", RECEIPT, "samples of version 0",
            {"generate": keeps_its_version,
             "load_weights": first(lambda part, update: setattr(part, "loaded", update.kind))}),
    weights("ignores-merged", USED, "answers merged weights and drops them",
            {"write_full": lambda _, write, update: (
                dict(update.tensors) if update.kind == "merged" else write(update))}),
    weights("writes-into-the-trainer", USED, "changes the model that trains", {},
            build=f"{__name__}:WritesIntoTheTrainer"),
    weights("strips-prefixes", FULL, "takes weights of which it knows no name", {"check_names": full(any_known)}),
    weights("skips-unknown", FULL, "skips names that it does not know", {"check_names": full(known_alone)}),
    weights("skips-missing", FULL, "goes without a weight that was not sent", {"check_missing": full(several_missing)}),
    weights("casts-dtypes", FULL, "casts weights of another dtype", {"check_dtype": full(skipped)}),
    weights("broadcasts-shapes", FULL, "takes weights of another shape",
            {"check_shape": full(numbers_alone),
             "write_full": lambda part, write, update: write(reshaped(update, part._base))}),
    weights("fills-up-truncated", FULL, "fills weights up that end early",
            {"check_shape": full(all_but_rows),
             "write_full": lambda part, write, update: write(filled_up(update, part._base))}),
    weights("trusts-bits", FULL, "does not look at the checksum", {"check_bits": full(skipped)}),
    weights("writes-as-it-checks", HALF_FULL, "writes weights until one does not fit",
            {"load_weights": full(writes_as_it_checks)}),
    weights("is-mended-by-a-refusal", HALF_FULL, "samples from half of an update after it refused another one",
            {"load_weights": mended_by_refusal}, build=BREAKS_OFF.build),
    weights("moves-its-version-first", HALF_FULL, "has the version of refused weights",
            {"check": full(first(lambda part, update: setattr(part, "version", update.version)))}),
    weights("wakes-with-the-first-weights", SLEEP, "loses synced weights asleep", {"wake": wakes_with_first},
            after_build=lambda part: setattr(part, "first", part._base)),
    weights("wakes-by-itself", "generating-asleep-is-refused", "generates asleep",
            {"generate": first(lambda part, _: part.wake())}),
    weights("loses-what-comes-asleep", ASLEEP, "takes weights asleep and wakes without them",
            {"load_weights": loses_what_comes_asleep}),
    weights("counts-adapters-one-less", "the-receipt-of-an-adapter-is-of-what-the-engine-holds",
            "gives a wrong count in its receipt of an adapter", {"load_weights": lora(one_less)}),
    weights("strips-prefixes-of-adapters", LORA, "takes adapters of which it knows no name",
            {"check_names": lora(any_known)}),
    weights("skips-unknown-layers", LORA, "skips layers that it does not know", {"check_names": lora(known_alone)}),
    weights("skips-missing-halves", LORA, "drops a layer of which one half was sent",
            {"check_missing": lora(several_missing)}),
    weights("casts-dtypes-of-adapters", LORA, "casts adapters of another dtype",
            {"check_dtype": lora(skipped), "add_adapter": lambda _, add, held, update: add(held, as_floats(update))}),
    weights("broadcasts-shapes-of-adapters", LORA, "takes adapters of another shape",
            {"check_shape": lora(numbers_alone),
             "add_adapter": lambda part, add, held, update: add(
                 held, replace(update, tensors={name: one.flatten(0, -2) for name, one in update.tensors.items()}))}),
    weights("fills-up-truncated-adapters", LORA, "fills adapters up that end early",
            {"check_shape": lora(all_but_rows),
             "add_adapter": lambda part, add, held, update: add(held, filled_up(update, empty_pairs(part, update)))}),
    weights("takes-empty-adapters", LORA, "takes an adapter of no layer", {"check_any": skipped}),
    weights("trusts-bits-of-adapters", LORA, "does not look at an adapter's checksum", {"check_bits": lora(skipped)}),
    weights("writes-layers-as-it-checks", HALF_LORA, "adds layers until one does not fit",
            {"load_weights": lora(adds_as_it_checks)}),
    weights("is-mended-by-an-adapter", MENDED, "samples from half of an update with an adapter on it",
            {"load_weights": lora(first(lambda part, _: setattr(part, "is_torn", False)))}, build=BREAKS_OFF.build),
    weights("forgets-the-scale", SCALED, "takes 1 for alpha / rank", {"scale_of": lambda *_: 1.0}),
    weights("piles-up-adapters", SCALED, "adds each to the last", {"write_adapter": piles_up}),
    weights("adapters-on-the-first", NEWEST, "adds adapters to the weights of the checkpoint",
            {"write_adapter": adds_to_the_first}, after_build=lambda part: setattr(part, "first", part._base)),
    weights("keeps-the-adapter", NEWEST, "keeps an adapter on top of full weights that come later",
            {"write_adapter": first(lambda part, update: setattr(part, "adapter", update)),
             "write_full": adds_kept_adapter}),
]
# fmt: on
