"""Engines: they turn a request into a track, and take weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..types.array import Array

if TYPE_CHECKING:
    from ..types.request import Request
    from ..types.track import Track

__all__ = ["Engine", "WeightReceipt", "WeightUpdate"]


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """Named tensors for an engine."""

    version: int
    tensors: Mapping[str, Array]
    """`full`, `merged`: all parameters by their names in the plain module, frozen ones included. `lora`:
    `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank] of every adapted layer, by the layer's
    name in the plain module.

    They may be `unirl.core.types.weights.MadeTensors`, each made when it is asked for: go through `items()` once, one
    tensor at a time, and look at names, dtypes and shapes through `unirl.core.types.weights.forms`."""
    kind: Literal["full", "lora", "merged"]
    """`full` when all weights train; `lora`, or `merged` (folded into the base), when adapters do."""
    adapter: str = "default"
    """Name of the adapter, for LoRA."""
    adapter_scale: float = 1.0
    """alpha / rank of the adapter: the factor of B A in the weights, for LoRA."""
    checksum: str = ""
    """`unirl.core.types.weights.checksum` of the tensors."""
    digests: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """`unirl.core.types.weights.tensor_digests` of the tensors, if the exporter has computed them already: they are
    then sent along instead of being computed again. Empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class WeightReceipt:
    """The weights that an engine holds after an update."""

    version: int
    checksum: str
    num_tensors: int
    size_bytes: int


class Engine(Protocol):
    """Generates tracks. Build: `build(config, *, model: Model, device) -> Engine`.

    Runs under `no_grad` and restores the training mode of what it shares.

    One that rounds the weights it is sent may have `weight_dtypes`, weight -> dtype by torch's name: full weights are
    then exported in these, which are fewer bytes to send.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights that it samples with."""
        ...

    @version.setter
    def version(self, value: int, /) -> None: ...

    def generate(self, request: Request) -> Track:
        """The track of the request: every sample, in its order.

        A request is for one track; of a model with several, the engine is called once for each.
        """
        ...

    def load_weights(self, update: WeightUpdate) -> WeightReceipt: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
