"""An engine with separate weights: trainside's sampling over a copy of the model, as an engine elsewhere has one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import DiffusionModel, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.core.types.weights import checksum
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

__all__ = ["SPEC", "CopyingEngine"]

SPEC = dataclasses.replace(
    TRAINSIDE,
    name="copying",
    summary="Samples in process from a copy of the model that it is given weights for",
    build=f"{__name__}:CopyingEngine",
    capabilities=(TRAINSIDE.capabilities - {Cap.WEIGHTS_SHARED}) | {Cap.WEIGHTS_FULL, Cap.WEIGHTS_LORA, Cap.SLEEP},
)
HALVES = (".lora_A.weight", ".lora_B.weight")


class CopyingEngine(TrainsideEngine):
    """A `unirl.core.roles.Engine`. An adapter is folded into the weights, always from the base weights."""

    def __init__(self, config: TrainsideConfig, *, model: DiffusionModel, device: Any = None) -> None:
        super().__init__(config, model=copy.deepcopy(model))
        self._module: nn.Module = self._model.trainable
        self._base = {name: weight.detach().clone() for name, weight in self._module.named_parameters()}
        self._asleep: dict[str, Tensor] | None = None

    def generate(self, request: Request) -> Track:
        if self._asleep is not None:
            raise RunFailed("engine: samples were asked of 'copying' while it sleeps; call wake() first.")
        return super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Checks everything, then writes. Raises RecipeError for weights that do not fit."""
        if self._asleep is not None:
            raise RunFailed("engine: weights were sent to 'copying' while it sleeps; call wake() first.")
        self.check(update)
        held = self.write_adapter(update) if update.kind == "lora" else self.write_full(update)
        self.version = update.version
        return WeightReceipt(
            version=self.version,
            checksum=checksum(held),
            num_tensors=len(held),
            size_bytes=sum(tensor.nbytes for tensor in held.values()),
        )

    def sleep(self) -> None:
        if self._asleep is None:
            self._asleep = {name: weight.detach().clone().cpu() for name, weight in self._module.named_parameters()}
            for weight in self._module.parameters():
                weight.data = weight.data.new_empty(0)

    def wake(self) -> None:
        if self._asleep is not None:
            for name, weight in self._module.named_parameters():
                weight.data = self._asleep[name].to(self._model.device)
            self._asleep = None

    def check(self, update: WeightUpdate) -> None:
        self.check_any(update)
        expected = self.wanted_pairs(update.tensors) if update.kind == "lora" else self._base
        self.check_names(update, expected, sorted(update.tensors))
        for name, tensor in update.tensors.items():
            if name not in expected:
                continue
            self.check_dtype(update, name, torch.float32 if update.kind == "lora" else expected[name].dtype)
            self.check_shape(update, tensor, expected[name], name)
        self.check_bits(update)

    def wanted_pairs(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Both halves of every layer that is named, as empty tensors of the shape that they need."""
        expected: dict[str, Tensor] = {}
        for name in tensors:
            layer = name.removesuffix(HALVES[0]).removesuffix(HALVES[1])
            weight = self._base.get(f"{layer}.weight")
            if layer == name or weight is None:
                continue
            halves = [tensors.get(layer + half) for half in HALVES]
            rank = next(min(half.shape) for half in halves if half is not None)
            expected[layer + HALVES[0]] = torch.empty(rank, weight.shape[1])
            expected[layer + HALVES[1]] = torch.empty(weight.shape[0], rank)
        return expected

    def check_any(self, update: WeightUpdate) -> None:
        if not update.tensors:
            raise RecipeError("engine: an update without a single tensor was sent to 'copying'.")

    def check_names(self, update: WeightUpdate, expected: Mapping[str, Tensor], names: list[str]) -> None:
        """names: those that were sent, or some of them."""
        unknown = [name for name in names if name not in expected]
        if unknown:
            raise RecipeError(f"engine: weights {unknown[:3]} were sent, which 'copying' does not have.")
        self.check_missing(update, [name for name in sorted(expected) if name not in names])

    def check_missing(self, update: WeightUpdate, names: list[str]) -> None:
        if names:
            raise RecipeError(f"engine: weights {names[:3]} were not sent; all are needed.")

    def check_dtype(self, update: WeightUpdate, name: str, dtype: torch.dtype) -> None:
        sent = update.tensors[name].dtype
        if sent != dtype:
            raise RecipeError(f"engine: {name!r} was sent as {sent}; 'copying' takes {dtype}.")

    def check_shape(self, update: WeightUpdate, sent: Tensor, expected: Tensor, name: str) -> None:
        if sent.shape != expected.shape:
            raise RecipeError(
                f"engine: {name!r} was sent as {list(sent.shape)}; 'copying' takes {list(expected.shape)}."
            )

    def check_bits(self, update: WeightUpdate) -> None:
        result = checksum(update.tensors)
        if result != update.checksum:
            raise RecipeError(f"engine: weights with checksum {update.checksum} were sent; {result} arrived.")

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        weights = dict(self._module.named_parameters())
        for name, tensor in update.tensors.items():
            if name in weights:
                weights[name].data.copy_(tensor)
        self._base = {name: weight.detach().clone() for name, weight in weights.items()}
        return self._base

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        weights = dict(self._module.named_parameters())
        for name, base in self._base.items():
            weights[name].data.copy_(base)
        self.add_adapter(weights, update)
        return {name: tensor.clone() for name, tensor in update.tensors.items()}

    def add_adapter(self, weights: Mapping[str, Tensor], update: WeightUpdate) -> None:
        for name, tensor in update.tensors.items():
            layer, is_first, _ = name.partition(HALVES[0])
            other = update.tensors.get(layer + HALVES[1])
            if is_first and other is not None and f"{layer}.weight" in weights:
                weights[f"{layer}.weight"].data.add_(self.scale_of(update) * other @ tensor)

    def scale_of(self, update: WeightUpdate) -> float:
        return update.adapter_scale
