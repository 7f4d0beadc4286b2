"""SGLang's weights under their training names, and their state around a sync. Part of the pipeline, in SGLang's
worker.

SGLang merges an adapter into its layer's weights and keeps a copy of the base weights. Such a layer is nested one name
deeper from then on. SGLang fuses some layers by concatenating their outputs, and stacks their adapters.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.engine_host.received import read_weights

__all__ = ["HeldWeights"]


class HeldWeights:
    """Mixed into the pipeline. Each method is a call of the server."""

    bridge: Any
    unirl_version: int
    unirl_torn: str
    lora_layers: dict[str, Any]
    lora_layers_transformer_2: dict[str, Any]

    def unirl_inventory(self) -> list[tuple[str, str, str, dict[str, list[int]]]]:
        """For every weight: its component, SGLang's name, dtype, and name -> shape of its trained parts in
        concatenation order."""
        result: list[tuple[str, str, str, dict[str, list[int]]]] = []
        for component in self.bridge.modules:
            module = self.get_module(component)
            for own, held in module.named_parameters():
                if ".lora_" in own or own in self.bridge.constants:
                    continue
                path, _, kind = own.rpartition(".")
                parts = self._unirl_parts(component, path.replace(".base_layer", ""))
                pieces = _pieces(held, module.get_submodule(path), len(parts))
                names = [_path(part, kind) for part in parts]
                shapes = {name: list(one.shape) for name, one in zip(names, pieces, strict=True)}
                result.append((component, own, str(held.dtype).removeprefix("torch."), shapes))
        return result

    def unirl_begin(self, version: int) -> None:
        """Before a sync: disables generation and removes all adapters."""
        self.unirl_torn = f"the sync of version {version} did not complete."
        for layer in self._unirl_adapted().values():
            if layer.merged:
                layer.unmerge_lora_weights()
            layer.clear_lora_weights()
            layer.disable_lora = True

    def unirl_end_full(self, version: int) -> None:
        """After verified full weights, on top of which adapters apply."""
        for layer in self._unirl_adapted().values():
            layer.cpu_weight = layer.base_layer.weight.detach().to("cpu", copy=True)
        self.unirl_torn, self.unirl_version = "", version

    def unirl_end_lora(self, paths: Sequence[str], expected: str, version: int, scale: float) -> None:
        """After an adapter: verify SGLang's weights against the files. Raises RuntimeError when they differ."""
        tensors = read_weights(paths, expected)
        sent = {name.rpartition(".lora_")[0] for name in tensors}
        held = {at: layer for at, layer in self._unirl_adapted().items() if layer.merged or not layer.disable_lora}
        parts = {at: self._unirl_parts(*at) for at in held}
        if missing := sorted(sent.difference(*parts.values())):
            raise RuntimeError(f"{missing[0]!r} has an adapter in the update, but SGLang did not apply it.")
        if strange := sorted(".".join(at) for at in held if sent.isdisjoint(parts[at])):
            raise RuntimeError(f"{strange[0]!r} has an adapter in SGLang, but not in the update.")
        for at, layer in held.items():
            self._unirl_compare(parts[at], layer, tensors, scale)
        self.unirl_torn, self.unirl_version = "", version

    def _unirl_compare(self, parts: Sequence[str], layer: Any, tensors: Mapping[str, Tensor], scale: float) -> None:
        """Compare a fused layer with the weights sent for its `parts`. Raises RuntimeError when they differ."""
        device = layer.base_layer.weight.device
        weights, bases = (
            _pieces(one.detach().to(device), layer.base_layer, len(parts))
            for one in (layer.base_layer.weight, layer.cpu_weight)
        )
        downs, ups = (one.detach().to(device).reshape(-1, *one.shape[-2:]) for one in (layer.lora_A, layer.lora_B))
        are_whole = layer.merged and len(downs) == len(ups) == len(parts)
        for part, weight, base, own_down, own_up in zip(parts, weights, bases, downs, ups, strict=are_whole):
            same, expected = are_whole, base.double()
            if f"{part}.lora_A.weight" in tensors:
                down, up = (tensors[f"{part}.lora_{side}.weight"].to(device) for side in "AB")
                same = same and torch.equal(own_down, down.to(own_down.dtype))
                same = same and torch.equal(own_up, up.to(own_up.dtype))
                expected = expected + scale * (up.double() @ down.double())
            # SGLang adds in fp32 and rounds once: its error is a few units in the last place of the largest weight.
            bound = 8 * torch.finfo(weight.dtype).eps * float(expected.abs().max())
            if not same or float((weight.double() - expected).abs().max()) > bound:
                raise RuntimeError(f"the adapter of {part!r} was loaded, but the weights held differ from it.")

    def _unirl_parts(self, component: str, path: str) -> list[str]:
        """The trained layers fused into a layer of SGLang."""
        for pattern, name in self.bridge.renamed.items():
            if re.fullmatch(pattern, path):
                path = re.sub(pattern, name, path)
                break
        last = path.rpartition(".")[2]
        prefix = component if len(self.bridge.modules) > 1 else ""
        return [_path(prefix, path.removesuffix(last) + part) for part in self.bridge.fused.get(last, (last,))]

    def _unirl_adapted(self) -> dict[tuple[str, str], Any]:
        """Layers that take adapters, by component and SGLang's name."""
        each = {"transformer": self.lora_layers, "transformer_2": self.lora_layers_transformer_2}
        return {(name, path): layer for name in self.bridge.modules for path, layer in each[name].items()}


def _path(*names: str) -> str:
    """Names of modules, some of them empty, joined."""
    return ".".join(filter(None, names))


def _pieces(held: Tensor, layer: Any, count: int) -> Sequence[Tensor]:
    """A fused layer's weight or bias, split into those of its parts."""
    return held.split(list(layer.output_partition_sizes)) if count > 1 else (held,)
