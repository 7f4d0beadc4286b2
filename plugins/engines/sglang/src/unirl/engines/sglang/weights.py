"""What SGLang computes with, by the names that it trains under, and what happens to it around a sync. Part of the
pipeline, in SGLang's worker.

SGLang merges an adapter into the weights of its layer and keeps a copy of those without. A layer that had one once lies
one name deeper from then on. Of some layers that train it makes one, with their outputs one below the other, and stacks
their adapters.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.runtime.engine_host.received import read_weights

__all__ = ["HeldWeights"]


class HeldWeights:
    """Mixed into the pipeline. Each method is a call of the server."""

    bridge: Any
    unirl_version: int
    unirl_torn: str
    lora_layers: dict[str, Any]

    def unirl_inventory(self) -> list[tuple[str, str, dict[str, list[int]]]]:
        """Of every weight SGLang's name, its dtype, and name -> shape of what trains of it, one below the other."""
        module = self._unirl_module()
        found: list[tuple[str, str, dict[str, list[int]]]] = []
        for own, held in module.named_parameters():
            if ".lora_" in own or own in self.bridge.constants:
                continue
            path, _, kind = own.rpartition(".")
            parts = self._unirl_parts(path.replace(".base_layer", ""))
            pieces = _pieces(held, module.get_submodule(path), len(parts))
            shapes = {f"{part}.{kind}".lstrip("."): list(one.shape) for part, one in zip(parts, pieces, strict=True)}
            found.append((own, str(held.dtype).removeprefix("torch."), shapes))
        return found

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
        parts = {path: self._unirl_parts(path) for path in held}
        if missing := sorted(sent.difference(*parts.values())):
            raise RuntimeError(f"{missing[0]!r} has an adapter, and SGLang put none on it.")
        if strange := sorted(path for path in held if sent.isdisjoint(parts[path])):
            raise RuntimeError(f"{strange[0]!r} has an adapter, and none was sent.")
        for path, layer in held.items():
            self._unirl_compare(parts[path], layer, tensors, scale)
        self.unirl_torn, self.unirl_version = "", version

    def _unirl_compare(self, parts: Sequence[str], layer: Any, tensors: Mapping[str, Tensor], scale: float) -> None:
        """A layer of SGLang's, made of `parts`, with what was sent for them. Raises RuntimeError when it differs."""
        weights, bases = (
            _pieces(one.detach().to("cpu"), layer.base_layer, len(parts))
            for one in (layer.base_layer.weight, layer.cpu_weight)
        )
        downs, ups = (one.detach().to("cpu").reshape(-1, *one.shape[-2:]) for one in (layer.lora_A, layer.lora_B))
        are_whole = layer.merged and len(downs) == len(ups) == len(parts)
        for part, weight, base, own_down, own_up in zip(parts, weights, bases, downs, ups, strict=are_whole):
            same, wanted = are_whole, base.double()
            if f"{part}.lora_A.weight" in tensors:
                down, up = tensors[f"{part}.lora_A.weight"], tensors[f"{part}.lora_B.weight"]
                same = same and torch.equal(own_down, down.to(own_down.dtype))
                same = same and torch.equal(own_up, up.to(own_up.dtype))
                wanted = wanted + scale * (up.double() @ down.double())
            # SGLang adds in fp32 and rounds once: its error is a few units in the last place of the largest weight.
            bound = 8 * torch.finfo(weight.dtype).eps * float(wanted.abs().max())
            if not same or float((weight.double() - wanted).abs().max()) > bound:
                raise RuntimeError(f"the adapter of {part!r} was loaded, and something else is held.")

    def _unirl_parts(self, path: str) -> list[str]:
        """Layers that train, of which one of SGLang's was made."""
        last = path.rpartition(".")[2]
        return [path.removesuffix(last) + part for part in self.bridge.fused.get(last, (last,))]

    def _unirl_module(self) -> Any:
        return self.get_module(self.bridge.module)


def _pieces(held: Tensor, layer: Any, count: int) -> Sequence[Tensor]:
    """A weight or bias of a layer, cut into those of the layers that it was made of."""
    return held.split(list(layer.output_partition_sizes)) if count > 1 else (held,)
