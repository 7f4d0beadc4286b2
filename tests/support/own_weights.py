"""An engine in this process with separate weights, for rollouts that are made during training."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from unirl.core.roles import Model, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Choice
from unirl.core.types.weights import checksum
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

__all__ = ["OwnWeights", "with_own_weights"]


class OwnWeights(TrainsideEngine):
    """Samples from a copy of the model that it is given full weights for."""

    def __init__(self, config: TrainsideConfig, *, model: Model) -> None:
        super().__init__(config, model=copy.deepcopy(model))
        self.version = -1

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        held = dict(self._model.trainable.named_parameters())
        assert held.keys() == update.tensors.keys()
        for name, tensor in update.tensors.items():
            held[name].data.copy_(tensor)
        self.version = update.version
        return WeightReceipt(
            version=self.version,
            checksum=checksum(held),
            num_tensors=len(held),
            size_bytes=sum(tensor.nbytes for tensor in held.values()),
        )


def own_weights(config: Any, *, model: Model, device: Any) -> OwnWeights:
    return OwnWeights(config, model=model)


SPEC = dataclasses.replace(
    TRAINSIDE,
    name="own-weights",
    build=f"{__name__}:own_weights",
    capabilities=(TRAINSIDE.capabilities - {Cap.WEIGHTS_SHARED}) | {Cap.WEIGHTS_FULL},
)


def with_own_weights(engine: Choice[Any, Any]) -> Choice[Any, Any]:
    """The choice of `trainside` with this engine in its place."""
    return dataclasses.replace(engine, spec=SPEC)
