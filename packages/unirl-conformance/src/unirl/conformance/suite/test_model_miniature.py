"""The miniature checkpoint of a model, with which all other claims are tested, and its trainable module."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.model import ModelCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.specs.capability import Cap
from unirl.core.specs.facts import names_in

MAX_BYTES = 20_000_000
"""A hundred miniatures of this size still fit on a small machine, and each is read many times a run."""
MAX_SECONDS = 60.0
"""CPU seconds; a few are usual. Past this, trying one model takes longer than trying everything may."""


@claim("model", track="any")
def test_miniature_is_small_and_quick(case: ModelCase) -> None:
    """The model has a miniature checkpoint of at most 20 MB, written within a minute, so that whoever changes a part
    can try it on every model without a download or a GPU.

    If it fails: take fewer layers and narrower ones in the function that the spec's `tiny` names, and small
    vocabularies: a tokenizer's table is often most of the bytes.
    """
    began = time.process_time()
    folder = case.checkpoint(again=True)
    seconds = time.process_time() - began
    size = sum(file.stat().st_size for file in _files(folder).values())
    assert size, f"`tiny.write` of model {case.spec.name!r} wrote nothing"
    case.record("size in bytes", size, bound=MAX_BYTES)
    case.record("CPU seconds", seconds, bound=MAX_SECONDS)


@claim("model", track="any")
def test_miniature_is_the_same_bytes_for_the_same_seed(case: ModelCase) -> None:
    """The same seed writes the same bytes into every file, whatever ran before; another seed gives other weights. So
    a number that was measured on a miniature can be measured again anywhere.

    If it fails: seed torch inside `tiny.write` (in `torch.random.fork_rng`), take nothing from NumPy's or Python's
    global generators, and write no time, path or set order into a file.
    """
    first = _files(case.checkpoint())
    with _other_generators():
        second = _files(case.checkpoint(again=True))
    assert first.keys() == second.keys(), f"one seed wrote {sorted(first)}, and then {sorted(second)}"
    differing = [name for name, file in first.items() if file.read_bytes() != second[name].read_bytes()]
    assert not differing, f"the same seed wrote other bytes into {', '.join(differing)}"
    other = _files(case.checkpoint(seed=1))
    equal = first.keys() == other.keys() and all(f.read_bytes() == other[n].read_bytes() for n, f in first.items())
    assert not equal, "seeds 0 and 1 wrote the same bytes: the seed is not used"


@claim("model", track="any")
def test_model_follows_its_config(case: ModelCase) -> None:
    """The model loads from its folder onto the requested device and carries exactly the matched spec, from which
    backends read LoRA targets and blocks.

    If it fails: set `spec` to the plugin's SPEC, and move the trainable module and `device` to the device of `build`.
    """
    with case.model() as model:
        assert model.spec == case.spec, f"the model says it is {model.spec.name!r}; the catalog's spec differs from it"
        expected = torch.device(case.device).type
        assert torch.device(model.device).type == expected, f"`device`: got {model.device}, expected {case.device}"
        away = [name for name, param in model.trainable.named_parameters() if param.device.type != expected]
        assert not away, f"{len(away)} weights are not on {case.device}, the first is {away[0]}"


@claim("model", track="any")
def test_only_the_named_module_trains(case: ModelCase) -> None:
    """`trainable` is the module that the spec names, and no weight outside of it takes gradients: encoders and decoders
    would cost memory and drift.

    If it fails: give `getattr(self, SPEC.trainable)` from `trainable`, and call `requires_grad_(False)` on every other
    module when the model is built.
    """
    model = case.fresh_model()
    named = getattr(model, case.spec.trainable, None)
    assert named is model.trainable, f"`trainable` is not the model's attribute {case.spec.trainable!r}"
    own = {id(param) for param in model.trainable.parameters()}
    assert own, "the trainable module has no weights"
    loose = [
        f"{where}.{name}"
        for where, module in _modules(model)
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in own
    ]
    assert not loose, f"{len(loose)} weights outside of {case.spec.trainable!r} take gradients, the first is {loose[0]}"


@claim("model", proves=Cap.LORA, track="any")
def test_lora_targets_match_what_the_miniature_promises(case: ModelCase) -> None:
    """Every ending in `lora_targets` matches a linear layer, and together they match as many as `tiny.lora_layers`
    says: a renamed layer is noticed here instead of staying untrained.

    If it fails: compare `lora_targets` with the names of `model.trainable.named_modules()`; when the model really has
    another number of such layers, correct `tiny.lora_layers`.
    """
    with case.model() as model:
        matched = case.lora_layers(model.trainable)
    assert matched, "the spec states the capability 'lora' and names no `lora_targets`"
    idle = [target for target, names in matched.items() if not names]
    assert not idle, f"no linear layer ends in {', '.join(map(repr, idle))}"
    layers = {name for names in matched.values() for name in names}
    case.record("LoRA layers", len(layers))
    promised = case.tiny.lora_layers
    assert len(layers) == promised, f"`tiny.lora_layers` says {promised}; `lora_targets` match {len(layers)}"


@claim("model", track="any")
def test_wrap_blocks_match_what_the_miniature_promises(case: ModelCase) -> None:
    """Every class in `wrap_blocks` is found in the trainable module, as often as `tiny.wrap_blocks` says: otherwise
    sharding and recomputing would silently take the model as a whole.

    If it fails: compare `wrap_blocks` with the class names in `model.trainable.modules()`, or correct
    `tiny.wrap_blocks`.
    """
    if not case.spec.wrap_blocks:
        raise NotApplicable(f"model {case.spec.name!r} names no `wrap_blocks`: it is sharded as a whole")
    with case.model() as model:
        names = names_in(case.spec.wrap_blocks, model.trainable)
        result = [type(part).__name__ for part in model.trainable.modules()]
    assert names, f"{case.spec.wrap_blocks!r} found no class of blocks in {case.spec.trainable!r}"
    absent = [name for name in names if name not in result]
    assert not absent, f"no module of class {', '.join(absent)} is in {case.spec.trainable!r}"
    count = sum(result.count(name) for name in names)
    case.record("blocks", count)
    assert count == case.tiny.wrap_blocks, f"`tiny.wrap_blocks` says {case.tiny.wrap_blocks}; there are {count}"


def _files(folder: Path) -> dict[str, Path]:
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


@contextmanager
def _other_generators() -> Iterator[None]:
    """The global generators in another state inside the block, and in their own after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every torch module that can be reached from the attributes of a model, with the way to it."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("model", model)]
    while waiting:
        where, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield where, value
        elif isinstance(value, Mapping):
            waiting += [(f"{where}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{where}[{number}]", item) for number, item in enumerate(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | torch.Tensor):
            waiting += [(f"{where}.{name}", item) for name, item in vars(value).items()]
