"""Backends whose adapters, exported weights or policies are not what they should be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.roles import Job, Policy, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.weights import MadeTensors, checksum, forms

from conformance_mutants.backend_training import FULL, LORA
from conformance_mutants.backend_wrapped import Wrapped, is_enabled, put, with_tensors
from conformance_mutants.mutant import mutant, mutants_in

ADAPTED = "blocks.0.up.weight"
"""A weight of the model that is adapted."""


def with_targets(model: Any, targets: list[str]) -> Any:
    view = copy.copy(model)
    view.spec = dataclasses.replace(model.spec, lora_targets=tuple(targets))
    return view


def matched(model: Any) -> list[str]:
    names = [name for name, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
    return [target for target in model.spec.lora_targets if any(f".{name}".endswith(f".{target}") for name in names)]


@mutant(
    claim="lora-adapts-the-layers-that-the-targets-match",
    name="first-target-alone",
    breaks="adapts the layers of the first target alone",
    promises=LORA,
)
class AdaptsTheFirstTarget(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        targets = list(model.spec.lora_targets)
        chosen = targets[:1] if matched(model) == targets else targets
        super().__init__(config, model=with_targets(model, chosen), **context)


@mutant(
    claim="lora-targets-that-match-nothing-are-refused", breaks="leaves out targets that match nothing", promises=LORA
)
class SkipsUnknownTargets(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        super().__init__(config, model=with_targets(model, matched(model)), **context)


@mutant(
    claim="lora-starts-at-the-base-model",
    breaks="starts with a B that is not 0",
    also=("the-adapter-switched-off-is-the-initial-model",),
    promises=LORA,
)
class StartsWithNoise(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        update = self.inner.export_weights(kind="lora")
        noisy = {
            name: torch.full_like(value, 0.01) if ".lora_B." in name else value
            for name, value in update.tensors.items()
        }
        self.inner.adopt(with_tensors(update, noisy))


@mutant(claim="adapters-start-from-the-seed-alone", breaks="draws A from a fixed seed", promises=LORA)
class IgnoresTheSeed(Wrapped):
    def __init__(self, config: Any, *, seed: int, **context: Any) -> None:
        super().__init__(config, seed=0, **context)


@mutant(
    claim="lora-leaves-the-base-weights-alone",
    breaks="decays the weights that do not train",
    also=(
        "weight-decay-is-decoupled",
        "a-resumed-training-is-the-uninterrupted-one",
        "frozen-weights-stay-frozen",
    ),
    promises=LORA,
)
class DecaysTheBase(Wrapped):
    @torch.no_grad()
    def decay(self, num_updates: int) -> None:
        for param in self.model.trainable.parameters():
            if not param.requires_grad:
                param.mul_((1 - self.config.lr * self.config.weight_decay) ** num_updates)

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        report = super().train(jobs, progress=progress)
        self.decay(report.num_updates)
        return report


@mutant(
    claim="merged-weights-are-the-base-plus-scaled-b-a",
    breaks="leaves alpha / rank out of merged weights",
    promises=LORA,
)
class MergesWithoutScale(Wrapped):
    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        update = super().export_weights(policy=policy, kind=kind)
        if kind != "merged" or policy == "reference":
            return update
        base = super().export_weights(policy="reference", kind="merged").tensors
        scale = super().export_weights(policy=policy, kind="lora").adapter_scale
        unscaled = {name: base[name] + (value - base[name]) / scale for name, value in update.tensors.items()}
        return with_tensors(update, unscaled)


@mutant(
    claim="exported-names-are-those-of-the-plain-module",
    name="wrapped-names",
    breaks="exports a weight under its wrapped name as well",
    also=(
        "another-model-may-be-the-reference-of-a-job",
        "full-training-is-torchs-adamw",
        "training-on-text-is-torchs-adamw",
        "weight-decay-is-decoupled",
        "gradients-are-clipped-by-their-global-norm",
        "exported-weights-are-those-in-use",
        "adopted-weights-compute-what-the-trainer-computes",
        "weights-that-do-not-fit-are-not-adopted",
    ),
    promises=FULL,
)
class ExportsWrappedNames(Wrapped):
    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        update = super().export_weights(policy=policy, kind=kind)
        wrapped = {f"module.{name}": value.clone() for name, value in list(update.tensors.items())[:1]}
        return with_tensors(update, {**update.tensors, **wrapped})


@mutant(claim="weights-carry-version-kind-and-checksum", breaks="gives the checksum of the first tensor", promises=FULL)
class SumsOneTensor(Wrapped):
    def export_weights(self, **asked: Any) -> WeightUpdate:
        update = super().export_weights(**asked)
        first = min(update.tensors)
        return dataclasses.replace(update, checksum=checksum({first: update.tensors[first]}))


@mutant(claim="weights-are-copies", breaks="hands out the weights that train", promises=FULL)
class ExportsViews(Wrapped):
    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        params = dict(self.model.trainable.named_parameters())
        update = super().export_weights(policy=policy, kind=kind)
        return dataclasses.replace(update, tensors={name: params[name].detach() for name in update.tensors})


@mutant(
    claim="weights-are-copies", name="makes-newer-ones", breaks="makes tensors of the weights of later", promises=FULL
)
class MakesNewerOnes(Wrapped):
    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        update = super().export_weights(policy=policy, kind=kind)

        def make(name: str) -> Tensor:
            return super(MakesNewerOnes, self).export_weights(policy=policy, kind=kind).tensors[name]

        made = MadeTensors({name: partial(make, name) for name in update.tensors}, forms=forms(update.tensors))
        return dataclasses.replace(update, tensors=made)


@mutant(claim="exported-weights-are-those-in-use", breaks="trains a copy of the module", promises=FULL)
class TrainsACopy(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        super().__init__(config, model=copy.deepcopy(model), **context)


@mutant(
    claim="trainable-weights-are-fp32", breaks="hands out what trains in the dtype of the checkpoint", promises=FULL
)
class KeepsTheDtype(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        self.dtype = next(model.trainable.parameters()).dtype
        super().__init__(config, model=model, **context)

    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        update = super().export_weights(policy=policy, kind=kind)
        return with_tensors(update, {name: value.to(self.dtype) for name, value in update.tensors.items()})


@mutant(
    claim="the-adapter-switched-off-is-the-initial-model",
    name="leaves-one-on",
    breaks="leaves the adapter of one layer on",
    promises=LORA,
)
class LeavesOneAdapterOn(Wrapped):
    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        adapted = {}
        if which == "reference":
            adapted = {ADAPTED: self.inner.export_weights(kind="merged").tensors[ADAPTED]}
        with super().policy(which), self.holding(adapted):
            yield


@mutant(
    claim="the-reference-copy-is-the-initial-model",
    breaks="copies the live weights into the reference at the end of every rollout",
    promises=(*FULL, Cap.REFERENCE_COPY),
)
class RefreshesTheReference(Wrapped):
    def end_rollout(self) -> None:
        super().end_rollout()
        if is_enabled(self.config, Cap.REFERENCE_COPY):
            self.kept["reference"] = dict(self.inner.export_weights(kind="full").tensors)


@mutant(
    claim="live-weights-are-restored-after-a-policy",
    breaks="keeps another policy's weights after an error",
    promises=(*FULL, Cap.REFERENCE_COPY),
)
class StaysAfterAnError(Wrapped):
    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        used: dict[str, Tensor] = {}
        try:
            with super().policy(which):
                try:
                    yield
                except BaseException:
                    used = {name: param.detach().clone() for name, param in self.trained().items()}
                    raise
        finally:
            put(self.trained(), used)


@mutant(claim="the-average-follows-its-formula", breaks="takes the decay for 1 - decay", promises=(*FULL, Cap.EMA))
class SwapsDecay(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(
            dataclasses.replace(config, ema=dataclasses.replace(config.ema, decay=1 - config.ema.decay)), **context
        )


@mutant(
    claim="the-lagged-policy-follows-its-formula",
    name="lags-by-steps",
    breaks="moves the lagged policy with every step",
    promises=(*FULL, Cap.LAGGED_POLICY),
)
class MovesTheLaggedPolicyEveryStep(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        lagged = dataclasses.replace(config.lagged, every="step")
        super().__init__(dataclasses.replace(config, lagged=lagged), **context)


@mutant(
    claim="a-policy-that-is-not-kept-is-refused",
    name="falls-back-to-live",
    breaks="gives the live weights where no policy is kept",
    promises=FULL,
)
class FallsBackToTheLivePolicy(Wrapped):
    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        with ExitStack() as stack:
            with suppress(RecipeError):
                stack.enter_context(super().policy(which))
            yield

    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        try:
            return super().export_weights(policy=policy, kind=kind)
        except RecipeError:
            return super().export_weights(kind=kind)


@mutant(claim="frozen-weights-stay-frozen", breaks="trains what the model has frozen", promises=FULL)
class TrainsFrozenWeights(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        params = list(model.trainable.parameters())
        model.trainable.requires_grad_(any(param.requires_grad for param in params))
        super().__init__(config, model=model, **context)


@mutant(claim="frozen-weights-stay-frozen", name="adapts-frozen-layers", breaks="adapts frozen layers", promises=LORA)
class AdaptsFrozenLayers(TrainsFrozenWeights):
    pass


@mutant(claim="a-model-that-is-frozen-whole-is-refused", breaks="trains a model that is frozen whole", promises=FULL)
class ThawsAModelThatIsFrozenWhole(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        if not any(param.requires_grad for param in model.trainable.parameters()):
            model.trainable.requires_grad_(True)
        super().__init__(config, model=model, **context)


@mutant(
    claim="a-model-without-values-trains-as-one-with-them",
    breaks="leaves a tensor at 0",
    promises=(*FULL, Cap.LAZY_BUILD),
)
class LeavesATensorAt0(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        view = copy.copy(model)
        view.fill = self.fill
        self.original = model
        super().__init__(config, model=view, **context)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self.original.fill(tensors)
        with torch.no_grad():
            list(tensors.values())[-1].zero_()


@mutant(
    claim="a-model-without-values-trains-as-one-with-them",
    name="teaches-with-zeros",
    breaks="leaves a tensor of a teacher at 0",
    promises=(*FULL, Cap.LAZY_BUILD),
)
class TeachesWithZeros(Wrapped):
    def hold_frozen(self, model: Any) -> None:
        self.inner.hold_frozen(model)
        with torch.no_grad():
            list(model.trainable.parameters())[-1].zero_()


BROKEN = mutants_in(__name__)
