"""Weight updates that are incompatible with an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from unirl.conformance.doubles.weight_updates import full_update, lora_update, update_of
from unirl.core.errors import EchoMismatch
from unirl.core.roles import Engine, Model, WeightUpdate

__all__ = ["check_unfit_updates", "unfit_updates"]


def check_unfit_updates(engine: Engine, model: Model, sampled: Callable[[], object]) -> None:
    """Each of `unfit_updates` is rejected and changes neither the version nor the samples."""
    engine.load_weights(full_update(model, version=1))
    before = sampled()
    for what, update in unfit_updates(model, version=9).items():
        with pytest.raises(EchoMismatch, match="weights:"):
            engine.load_weights(update)
            pytest.fail(f"{what} was taken")
        assert engine.version == 1
    assert sampled() == before


def unfit_updates(model: Model, *, version: int) -> dict[str, WeightUpdate]:
    """Defect -> an update of the weights of `model`, or of adapters for its layers."""
    tensors = dict(full_update(model, version=version).tensors)
    name = next(name for name, value in tensors.items() if value.ndim == 1)
    one, others = tensors[name], {other: value for other, value in tensors.items() if other != name}
    adapter, _ = lora_update(model, model.spec, version=version, seed=1, scale=1.0)
    pairs = dict(adapter.tensors)
    up = next(other for other in pairs if other.endswith("lora_B.weight"))
    full = {
        "a prefix": {f"module.{other}": value for other, value in tensors.items()},
        "a stranger": {**tensors, "no.such.weight": one},
        "one missing": others,
        "a shape": {**others, name: one[None]},
        "a dtype": {**others, name: one.bfloat16()},
    }
    lora = {
        "no pair": {},
        "half a pair": {other: value for other, value in pairs.items() if other != up},
        "an adapter's prefix": {f"x.{other}": value for other, value in pairs.items()},
        "an adapter's shape": {**pairs, up: pairs[up][None]},
    }
    changed = update_of({**others, name: one + 1}, version=version, kind="full")
    return {
        **{what: update_of(sent, version=version, kind="full") for what, sent in full.items()},
        **{what: update_of(sent, version=version, kind="lora") for what, sent in lora.items()},
        "other bits": dataclasses.replace(changed, checksum=adapter.checksum),
        "an adapter's bits": dataclasses.replace(adapter, checksum=changed.checksum),
    }
