"""Backends whose adapters, exported weights or policies are not what they should be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from unirl.backends.fsdp2.averages import Average
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.capability import Cap
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightUpdate
from unirl.core.weights import checksum

from conformance_mutants.backend_training import FULL, LORA
from conformance_mutants.mutant import Mutant


def with_targets(model: Any, targets: list[str]) -> Any:
    view = copy.copy(model)
    view.spec = dataclasses.replace(model.spec, lora_targets=tuple(targets))
    return view


def matched(model: Any) -> list[str]:
    names = [name for name, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
    return [target for target in model.spec.lora_targets if any(f".{name}".endswith(f".{target}") for name in names)]


class AdaptsTheFirstTarget(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        targets = list(model.spec.lora_targets)
        return super()._prepare(with_targets(model, targets[:1] if matched(model) == targets else targets), seed)


class SkipsUnknownTargets(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        return super()._prepare(with_targets(model, matched(model)), seed)


class StartsWithNoise(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        layers = super()._prepare(model, seed)
        for name, param in self._module.named_parameters():
            if ".lora_B." in name:
                param.data.fill_(0.01)
        return layers


class IgnoresTheSeed(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        return super()._prepare(model, 0)


class DecaysTheBase(Fsdp2Backend):
    def _move(self, when: str) -> None:
        super()._move(when)
        if when == "step":
            for param in self._module.parameters():
                if not param.requires_grad:
                    param.data.mul_(1 - self._config.lr * self._config.weight_decay)


class MergesWithoutScale(Fsdp2Backend):
    def _exported(self, kind: str, *, is_on: bool) -> dict[str, Tensor]:
        found = super()._exported(kind, is_on=is_on)
        if kind == "merged" and is_on:
            base, lora = super()._exported(kind, is_on=False), self._config.lora
            found = {name: base[name] + (value - base[name]) * lora.rank / lora.alpha for name, value in found.items()}
        return found


class ExportsWrappedNames(Fsdp2Backend):
    def _exported(self, kind: str, *, is_on: bool) -> dict[str, Tensor]:
        found = super()._exported(kind, is_on=is_on)
        return found | {f"module.{name}": value.clone() for name, value in list(found.items())[:1]}


class SumsOneTensor(Fsdp2Backend):
    def weights(self, **asked: Any) -> WeightUpdate:
        update = super().weights(**asked)
        first = min(update.tensors)
        return dataclasses.replace(update, checksum=checksum({first: update.tensors[first]}))


class ExportsViews(Fsdp2Backend):
    def _exported(self, kind: str, *, is_on: bool) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._module.named_parameters()}


class TrainsACopy(Fsdp2Backend):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        super().__init__(config, model=copy.deepcopy(model), **context)


class KeepsTheDtype(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        self._module.requires_grad_(True)
        return 0


class LeavesOneAdapterOn(Fsdp2Backend):
    def _switch(self, which: Any) -> Any:
        switch = super()._switch(which)
        first = next(part for name, part in self._module.named_modules() if name.endswith("blocks.0.up"))

        def mostly(on: bool) -> None:
            switch(on)
            first.enable_adapters(True)  # type: ignore[operator]

        return mostly


class RefreshesTheReference(Fsdp2Backend):
    def end_rollout(self) -> None:
        super().end_rollout()
        if "reference" in self._copies:
            for name, value in self._copies["reference"].values.items():
                value.copy_(self._params[name].detach())


class StaysAfterAnError(Fsdp2Backend):
    @contextmanager
    def policy(self, which: Any = "live") -> Iterator[None]:
        if which == self._using:
            yield
            return
        switch = self._switch(which)
        switch(True)
        self._using = which
        try:
            yield
        except BaseException:
            self._using = "live"
            raise
        switch(False)
        self._using = "live"


class SwapsDecay(Fsdp2Backend):
    def _make_copies(self) -> Any:
        copies = super()._make_copies()
        if isinstance(copies.get("ema"), Average):
            config = copies["ema"].config
            copies["ema"].config = dataclasses.replace(config, decay=1 - config.decay)
        return copies


class MovesTheLaggedPolicyEveryStep(Fsdp2Backend):
    def _make_copies(self) -> Any:
        copies = super()._make_copies()
        if isinstance(copies.get("lagged"), Average):
            copies["lagged"].config = dataclasses.replace(copies["lagged"].config, every="step")
        return copies


class FallsBackToTheLivePolicy(Fsdp2Backend):
    def _switch(self, which: Any) -> Any:
        try:
            return super()._switch(which)
        except RecipeError:
            return lambda on: None


BROKEN: dict[type[Fsdp2Backend], tuple[Mutant, tuple[Cap, ...]]] = {
    AdaptsTheFirstTarget: (
        Mutant(
            claim="lora-adapts-the-layers-that-the-targets-match",
            name="first-target-alone",
            broken="adapts the layers of the first target alone",
        ),
        LORA,
    ),
    SkipsUnknownTargets: (
        Mutant(
            claim="lora-targets-that-match-nothing-are-refused",
            name="skips-unknown-targets",
            broken="leaves out targets that match nothing",
        ),
        LORA,
    ),
    StartsWithNoise: (
        Mutant(
            claim="lora-starts-at-the-base-model",
            name="starts-with-noise",
            broken="starts with a B that is not 0",
            also=("the-adapter-switched-off-is-the-initial-model",),
        ),
        LORA,
    ),
    IgnoresTheSeed: (
        Mutant(claim="adapters-start-from-the-seed-alone", name="ignores-the-seed", broken="draws A from a fixed seed"),
        LORA,
    ),
    DecaysTheBase: (
        Mutant(
            claim="lora-leaves-the-base-weights-alone",
            name="decays-the-base",
            broken="decays the weights that do not train",
            also=("weight-decay-is-decoupled", "a-resumed-training-is-the-uninterrupted-one"),
        ),
        LORA,
    ),
    MergesWithoutScale: (
        Mutant(
            claim="merged-weights-are-the-base-plus-scaled-b-a",
            name="merges-without-scale",
            broken="leaves alpha / rank out of merged weights",
        ),
        LORA,
    ),
    ExportsWrappedNames: (
        Mutant(
            claim="whole-weights-are-named-as-in-the-plain-module",
            name="wrapped-names",
            broken="exports a weight under its wrapped name as well",
            also=(
                "full-training-is-torchs-adamw",
                "training-on-text-is-torchs-adamw",
                "weight-decay-is-decoupled",
                "gradients-are-clipped-by-their-global-norm",
                "the-model-runs-with-the-weights-that-are-handed-out",
                "adopted-weights-compute-what-the-trainer-computes",
                "weights-that-do-not-fit-are-not-adopted",
            ),
        ),
        FULL,
    ),
    SumsOneTensor: (
        Mutant(
            claim="weights-carry-version-kind-and-checksum",
            name="sums-one-tensor",
            broken="gives the checksum of the first tensor",
        ),
        FULL,
    ),
    ExportsViews: (
        Mutant(claim="weights-are-copies", name="exports-views", broken="hands out the weights that train"),
        FULL,
    ),
    TrainsACopy: (
        Mutant(
            claim="the-model-runs-with-the-weights-that-are-handed-out",
            name="trains-a-copy",
            broken="trains a copy of the module",
        ),
        FULL,
    ),
    KeepsTheDtype: (
        Mutant(claim="what-trains-is-kept-in-fp32", name="keeps-the-dtype", broken="trains bf16 weights in bf16"),
        FULL,
    ),
    LeavesOneAdapterOn: (
        Mutant(
            claim="the-adapter-switched-off-is-the-initial-model",
            name="leaves-one-on",
            broken="leaves the adapter of one layer on",
            also=("a-loss-may-compare-with-another-policy",),
        ),
        LORA,
    ),
    RefreshesTheReference: (
        Mutant(
            claim="the-reference-copy-is-the-initial-model",
            name="refreshes-the-reference",
            broken="copies the live weights into the reference at the end of every rollout",
        ),
        (*FULL, Cap.REFERENCE_COPY),
    ),
    StaysAfterAnError: (
        Mutant(
            claim="the-live-weights-are-back-after-a-policy",
            name="stays-after-an-error",
            broken="keeps another policy's weights after an error",
        ),
        (*FULL, Cap.REFERENCE_COPY),
    ),
    SwapsDecay: (
        Mutant(claim="the-average-follows-its-formula", name="swaps-decay", broken="takes the decay for 1 - decay"),
        (*FULL, Cap.EMA),
    ),
    MovesTheLaggedPolicyEveryStep: (
        Mutant(
            claim="the-lagged-policy-follows-its-formula",
            name="lags-by-steps",
            broken="moves the lagged policy with every step",
        ),
        (*FULL, Cap.LAGGED_POLICY),
    ),
    FallsBackToTheLivePolicy: (
        Mutant(
            claim="a-policy-that-is-not-kept-is-refused",
            name="falls-back-to-live",
            broken="gives the live weights where no policy is kept",
        ),
        FULL,
    ),
}
