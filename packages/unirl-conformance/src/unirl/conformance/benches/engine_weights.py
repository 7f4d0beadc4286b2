"""What claims about the weights of an engine share: damaged updates, and the checks after a sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.capability import Cap
from unirl.core.errors import UniRLError
from unirl.core.request import Request
from unirl.core.roles import Engine, Model, WeightUpdate
from unirl.core.track import Track

from ..workbench.trained import update_of
from .engine import ROUNDING, EngineBench

__all__ = [
    "REFUSES",
    "check_as_before",
    "check_receipt",
    "check_recovers",
    "check_refusals",
    "check_samples",
    "damaged_full",
    "damaged_lora",
]

Damaged = Mapping[str, WeightUpdate]
"""What is wrong -> an update that is wrong in that way alone."""
REFUSES = (UniRLError, ValueError)
"""Errors that say something to a user."""


def damaged_full(good: WeightUpdate) -> Damaged:
    """Full weights that do not fit, the damage in the last tensor, so that what is written first is right.

    The other shape is one that a plain copy would broadcast, the other dtype one that it would cast.
    """
    *rest, last = good.tensors
    kept = {name: good.tensors[name] for name in rest}
    tensor = good.tensors[last]
    return _updates(
        good,
        {
            "names under another prefix": {f"module.{name}": value for name, value in good.tensors.items()},
            "another dtype": {**kept, last: tensor.to(_other_dtype(tensor))},
            "another shape": {**kept, last: tensor[None]},
            "a truncated tensor": {**kept, last: _truncated(tensor)},
            "a name that the model has not": {**good.tensors, "no.such.weight": tensor},
            "a missing tensor": kept,
        },
    )


def damaged_lora(good: WeightUpdate) -> Damaged:
    """Adapters that do not fit, the damage in the last pair."""
    *rest, last = good.tensors
    assert last.endswith(".lora_B.weight")
    kept = {name: good.tensors[name] for name in rest}
    tensor, layer = good.tensors[last], last.removesuffix(".lora_B.weight")
    stranger = {
        "no.such.layer.lora_A.weight": good.tensors[f"{layer}.lora_A.weight"],
        "no.such.layer.lora_B.weight": tensor,
    }
    return _updates(
        good,
        {
            "names under another prefix": {f"base_model.model.{name}": value for name, value in good.tensors.items()},
            "another dtype": {**kept, last: tensor.to(_other_dtype(tensor))},
            "another shape": {**kept, last: tensor[None]},
            "a truncated tensor": {**kept, last: _truncated(tensor)},
            "a layer that the model has not": {**good.tensors, **stranger},
            "half a pair": kept,
            "no tensor at all": {},
        },
    )


def check_receipt(bench: EngineBench, engine: Engine, update: WeightUpdate, *, request: Request) -> None:
    """The engine says that it holds just what was sent."""
    receipt = engine.load_weights(update)
    size = sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values())
    wanted = {
        "version": update.version,
        "checksum": update.checksum,
        "num_tensors": len(update.tensors),
        "size_bytes": size,
    }
    for name, value in wanted.items():
        found = getattr(receipt, name)
        assert found == value, f"{name}: {value} was sent, the receipt says {found}"
    assert engine.version == update.version, f"version {update.version} was sent, the engine says {engine.version}"
    versions = bench.sample(engine, request).policy_version
    assert versions == (update.version,) * request.num_rows, (
        f"version {update.version} was sent, the samples carry {versions}"
    )


def check_refusals(engine: Engine, damaged: Damaged) -> None:
    """Each of these raises an error for users."""
    for what, update in damaged.items():
        try:
            engine.load_weights(update)
        except REFUSES:
            continue
        raise AssertionError(f"an update with {what} was taken without a word")


def check_recovers(bench: EngineBench, cap: Cap, damaged: Damaged, good: WeightUpdate, *, trained: Model) -> None:
    """After each damaged update the samples are the old ones or refused; after the good one they are the new ones."""
    model = bench.fresh_model()
    request = bench.decided_request(model)
    with bench.engine(model, enable=cap) as engine:
        before, version = bench.sample(engine, request), engine.version
        for what, update in damaged.items():
            try:
                engine.load_weights(update)
            except REFUSES:
                pass
            else:  # of which another claim speaks
                before, version = bench.sample(engine, request), engine.version
                continue
            check_as_before(bench, engine, request, before, version=version, what=f"an update with {what}")
        engine.load_weights(good)
        check_samples(bench, request, bench.sample(engine, request), model=trained, name="off after a whole sync")


def check_as_before(
    bench: EngineBench, engine: Engine, request: Request, before: Track, *, version: int, what: str
) -> None:
    """After an update was refused the engine refuses to sample, or samples as before, under its old version."""
    try:
        after = bench.sample(engine, request)
    except REFUSES:
        return
    found = after.policy_version[0]
    assert found == version, f"{what} was refused, and version {version} became {found}"
    moved = bench.moved(after, before)
    assert moved <= ROUNDING, f"{what} was refused, and yet moved the samples by {moved:.3g}"


def check_samples(
    bench: EngineBench,
    request: Request,
    track: Track,
    *,
    model: Model,
    name: str,
    unlike: Track | None = None,
) -> None:
    """The samples are made by this model's weights, and are not the earlier ones."""
    bench.check_made_by(model, request, track, name=name)
    if unlike is not None:
        moved = bench.moved(track, unlike)
        # The change of the weights is large, so that even a model of random weights answers to it.
        assert moved > 10 * ROUNDING, f"other weights move the samples by {moved:.3g} alone"


def _updates(good: WeightUpdate, tensors: Mapping[str, Mapping[str, Tensor]]) -> Damaged:
    """The damaged sets with checksums of their own, and the good one with a checksum that is not its."""
    found = {
        what: update_of(values, version=good.version, kind=good.kind, scale=good.adapter_scale)
        for what, values in tensors.items()
    }
    return {**found, "a checksum of other bits": dataclasses.replace(good, checksum="0" * 32)}


def _truncated(tensor: Tensor) -> Tensor:
    """All but its last row, as of a transfer that ended early."""
    return tensor.reshape(-1, *tensor.shape[1:])[:-1]


def _other_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is not torch.float64 else torch.float32
