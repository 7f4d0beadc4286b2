"""What SGLang computes with, by the names that it trains under, and what happens to it around a sync. Part of the
pipeline, in SGLang's worker.

SGLang merges an adapter into the weights of its layer and keeps a copy of those without. A layer that had one once lies
one name deeper from then on.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from unirl.runtime.engine_host.received import read_weights

__all__ = ["HeldWeights"]


class HeldWeights:
    """Mixed into the pipeline. Each method is a call of the server."""

    bridge: Any
    unirl_version: int
    unirl_torn: str
    lora_layers: dict[str, Any]

    def unirl_inventory(self) -> list[tuple[str, str, str, list[int]]]:
        """Name that it trains under, name that SGLang has for it, dtype and shape of every weight."""
        return [
            (name.replace(".base_layer.", "."), name, str(held.dtype).removeprefix("torch."), list(held.shape))
            for name, held in self._unirl_module().named_parameters()
            if ".lora_" not in name and name not in self.bridge.constants
        ]

    def unirl_begin(self, version: int) -> None:
        """Before a sync: from here on nothing is generated, and no layer has an adapter."""
        self.unirl_torn = f"the sync of version {version} did not come to its end."
        for layer in self.lora_layers.values():
            if layer.merged:
                layer.unmerge_lora_weights()
            layer.clear_lora_weights()
            layer.disable_lora = True

    def unirl_end_full(self, version: int) -> None:
        """After full weights, which were compared: adapters go on top of them."""
        for layer in self.lora_layers.values():
            layer.cpu_weight = layer.base_layer.weight.detach().to("cpu", copy=True)
        self.unirl_torn, self.unirl_version = "", version

    def unirl_end_lora(self, paths: Sequence[str], expected: str, version: int, scale: float) -> None:
        """After an adapter: compare what is computed with to what is in the files. Raises RuntimeError when it is
        something else."""
        tensors = read_weights(paths, expected)
        sent = {name.rpartition(".lora_")[0] for name in tensors}
        held = {path: layer for path, layer in self.lora_layers.items() if layer.merged or not layer.disable_lora}
        if missing := sorted(sent - held.keys()):
            raise RuntimeError(f"{missing[0]!r} has an adapter, and SGLang put none on it.")
        if strange := sorted(held.keys() - sent):
            raise RuntimeError(f"{strange[0]!r} has an adapter, and none was sent.")
        for path, layer in held.items():
            down, up = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
            same = layer.merged and all(
                torch.equal(own.detach().to("cpu"), one.to(own.dtype))
                for own, one in ((layer.lora_A, down), (layer.lora_B, up))
            )
            weight = layer.base_layer.weight.detach().to("cpu")
            wanted = layer.cpu_weight.double() + scale * (up.double() @ down.double())
            # SGLang adds in fp32 and rounds once: its error is a few units in the last place of the largest weight.
            bound = 8 * torch.finfo(weight.dtype).eps * float(wanted.abs().max())
            if not same or float((weight.double() - wanted).abs().max()) > bound:
                raise RuntimeError(f"the adapter of {path!r} was loaded, and something else is held.")
        self.unirl_torn, self.unirl_version = "", version

    def _unirl_module(self) -> Any:
        return self.get_module(self.bridge.module)
