"""Backends whose adapters, exported weights or policies are wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.roles import Job, Policy, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.weights import MadeTensors, checksum, forms

from conformance_mutants.backend_wrapped import (
    FULL,
    LORA,
    Wrapped,
    backend,
    copies,
    exports,
    is_enabled,
    put,
    with_tensors,
)
from conformance_mutants.changes import changed, if_refused, returns, then

ADAPTED = "blocks.0.up.weight"
"""A weight of the model that is adapted."""
DECAY, RESUMED = "weight-decay-is-decoupled", "a-resumed-training-is-the-uninterrupted-one"
SNAPSHOT = "a-snapshot-keeps-the-state-of-its-moment"
IN_USE, OFF = "exported-weights-are-those-in-use", "the-adapter-switched-off-is-the-initial-model"
FROZEN, COPIES = "frozen-weights-stay-frozen", "weights-are-copies"
LAZY = "a-model-without-values-trains-as-one-with-them"


def with_targets(model: Any, targets: list[str]) -> Any:
    view = copy.copy(model)
    view.spec = replace(model.spec, lora_targets=tuple(targets))
    return view


def matched(model: Any) -> list[str]:
    names = [name for name, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
    return [target for target in model.spec.lora_targets if any(f".{name}".endswith(f".{target}") for name in names)]


def first_target_alone(model: Any) -> Any:
    targets = list(model.spec.lora_targets)
    return with_targets(model, targets[:1] if matched(model) == targets else targets)


def start_with_noise(part: Wrapped) -> None:
    update = part.inner.export_weights(kind="lora")
    noisy = {
        name: torch.full_like(value, 0.01) if ".lora_B." in name else value for name, value in update.tensors.items()
    }
    part.inner.adopt(with_tensors(update, noisy))


def decays_the_base(part: Wrapped, train: Any, jobs: Sequence[Job], *, progress: float) -> TrainReport:
    report = train(jobs, progress=progress)
    with torch.no_grad():
        for param in part.model.trainable.parameters():
            if not param.requires_grad:
                param.mul_((1 - part.config.lr * part.config.weight_decay) ** report.num_updates)
    return report


def merges_without_scale(_: Wrapped, export: Any, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
    update = export(policy=policy, kind=kind)
    if kind != "merged" or policy == "reference":
        return update
    base = export(policy="reference", kind="merged").tensors
    scale = export(policy=policy, kind="lora").adapter_scale
    return with_tensors(
        update, {name: base[name] + (value - base[name]) / scale for name, value in update.tensors.items()}
    )


def exports_views(part: Wrapped, export: Any, **asked: Any) -> WeightUpdate:
    params, update = dict(part.model.trainable.named_parameters()), export(**asked)
    return replace(update, tensors={name: params[name].detach() for name in update.tensors})


def exports_newer_ones(_: Wrapped, export: Any, **asked: Any) -> WeightUpdate:
    def make(name: str) -> Tensor:
        return export(**asked).tensors[name]

    update = export(**asked)
    made = MadeTensors({name: partial(make, name) for name in update.tensors}, forms=forms(update.tensors))
    return replace(update, tensors=made)


@contextmanager
def leaves_one_on(part: Wrapped, policy: Any, which: Policy = "live") -> Iterator[None]:
    is_off = which == "reference"
    with (
        policy(which),
        part.holding({ADAPTED: part.inner.export_weights(kind="merged").tensors[ADAPTED]} if is_off else {}),
    ):
        yield


def refresh_reference(part: Wrapped) -> None:
    if is_enabled(part, Cap.REFERENCE_COPY):
        part.kept["reference"] = dict(part.inner.export_weights(kind="full").tensors)


@contextmanager
def stays_after_an_error(part: Wrapped, policy: Any, which: Policy = "live") -> Iterator[None]:
    used: dict[str, Tensor] = {}
    try:
        with policy(which):
            try:
                yield
            except BaseException:
                used = copies(part.trained())
                raise
    finally:
        put(part.trained(), used)


@contextmanager
def live_if_not_kept(_: Wrapped, policy: Any, which: Policy = "live") -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(RecipeError):
            stack.enter_context(policy(which))
        yield


def thawed_if_partly_frozen(model: Any) -> Any:
    model.trainable.requires_grad_(any(param.requires_grad for param in model.trainable.parameters()))
    return model


def thawed_if_frozen(model: Any) -> Any:
    if not any(param.requires_grad for param in model.trainable.parameters()):
        model.trainable.requires_grad_(True)
    return model


def filling_but_one(model: Any) -> Any:
    def fill(_: Any, fill: Any, tensors: Mapping[str, Tensor]) -> None:
        fill(tensors)
        with torch.no_grad():
            list(tensors.values())[-1].zero_()

    return changed(copy.copy(model), {"fill": fill}) if hasattr(model, "fill") else model


def holds_zeros(_: Wrapped, hold_frozen: Any, model: Any) -> None:
    hold_frozen(model)
    with torch.no_grad():
        list(model.trainable.parameters())[-1].zero_()


# fmt: off
MUTANTS = [
    backend("first-target-alone", "lora-adapts-the-layers-that-the-targets-match",
            "adapts the layers of the first target alone", LORA, arguments={"model": first_target_alone}),
    backend("skips-unknown-targets", "lora-targets-that-match-nothing-are-refused",
            "leaves out targets that match nothing", LORA,
            arguments={"model": lambda model: with_targets(model, matched(model))}),
    backend("starts-with-noise", "lora-starts-at-the-base-model", "starts with a B that is not 0", LORA, also=(OFF,),
            after_build=start_with_noise),
    backend("ignores-the-seed", "adapters-start-from-the-seed-alone", "draws A from a fixed seed", LORA,
            arguments={"seed": lambda seed: 0}),
    backend("decays-the-base", "lora-leaves-the-base-weights-alone", "decays the weights that do not train", LORA,
            also=(DECAY, RESUMED, SNAPSHOT, FROZEN), changes={"train": decays_the_base}),
    backend("merges-without-scale", "merged-weights-are-the-base-plus-scaled-b-a",
            "leaves alpha / rank out of merged weights", LORA, changes={"export_weights": merges_without_scale}),
    backend("wrapped-names", "exported-names-are-those-of-the-plain-module",
            "exports a weight under its wrapped name as well",
            also=("another-model-may-be-the-reference-of-a-job", "full-training-is-torchs-adamw",
                  "training-on-text-is-torchs-adamw", DECAY, "gradients-are-clipped-by-their-global-norm", IN_USE,
                  "adopted-weights-compute-what-the-trainer-computes", "weights-that-do-not-fit-are-not-adopted"),
            changes=exports(lambda _, tensors: {**tensors, f"module.{min(tensors)}": tensors[min(tensors)].clone()})),
    backend("sums-one-tensor", "weights-carry-version-kind-and-checksum", "gives the checksum of the first tensor",
            changes={"export_weights": returns(lambda update: replace(
                update, checksum=checksum({min(update.tensors): update.tensors[min(update.tensors)]})))}),
    backend("exports-views", COPIES, "hands out the weights that train",
            also=("settings-that-round-an-update-keep-their-bound",), changes={"export_weights": exports_views}),
    backend("makes-newer-ones", COPIES, "makes tensors of the weights of later",
            changes={"export_weights": exports_newer_ones}),
    backend("trains-a-copy", IN_USE, "trains a copy of the module", arguments={"model": copy.deepcopy}),
    backend("keeps-the-dtype", "trainable-weights-are-fp32", "hands out what trains in the dtype of the checkpoint",
            changes=exports(lambda part, tensors: {name: one.to(part.dtype) for name, one in tensors.items()})),
    backend("leaves-one-on", OFF, "leaves the adapter of one layer on", LORA, changes={"policy": leaves_one_on}),
    backend("refreshes-the-reference", "the-reference-copy-is-the-initial-model",
            "copies the live weights into the reference at the end of every rollout", (*FULL, Cap.REFERENCE_COPY),
            changes={"end_rollout": then(refresh_reference)}),
    backend("stays-after-an-error", "live-weights-are-restored-after-a-policy",
            "keeps another policy's weights after an error", (*FULL, Cap.REFERENCE_COPY),
            changes={"policy": stays_after_an_error}),
    backend("swaps-decay", "the-average-follows-its-formula", "takes the decay for 1 - decay", (*FULL, Cap.EMA),
            arguments={"config": lambda config: replace(config, ema=replace(config.ema, decay=1 - config.ema.decay))}),
    backend("lags-by-steps", "the-lagged-policy-follows-its-formula", "moves the lagged policy with every step",
            (*FULL, Cap.LAGGED_POLICY),
            arguments={"config": lambda config: replace(config, lagged=replace(config.lagged, every="step"))}),
    backend("falls-back-to-live", "a-policy-that-is-not-kept-is-refused",
            "gives the live weights where no policy is kept",
            changes={"policy": live_if_not_kept,
                     "export_weights": if_refused(lambda _, export, *, kind, **__: export(kind=kind))}),
    backend("trains-frozen-weights", FROZEN, "trains what the model has frozen",
            arguments={"model": thawed_if_partly_frozen}),
    backend("adapts-frozen-layers", FROZEN, "adapts frozen layers", LORA, arguments={"model": thawed_if_partly_frozen}),
    backend("thaws-a-model-that-is-frozen-whole", "a-model-that-is-frozen-whole-is-refused",
            "trains a model that is frozen whole", arguments={"model": thawed_if_frozen}),
    backend("leaves-a-tensor-at-0", LAZY, "leaves a tensor at 0", (*FULL, Cap.LAZY_BUILD),
            arguments={"model": filling_but_one}),
    backend("teaches-with-zeros", LAZY, "leaves a tensor of a teacher at 0", (*FULL, Cap.LAZY_BUILD),
            changes={"hold_frozen": holds_zeros}),
]
# fmt: on
