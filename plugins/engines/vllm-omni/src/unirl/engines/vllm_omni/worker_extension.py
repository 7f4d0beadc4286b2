"""What is added to vLLM-Omni's worker: taking weights, and saying which it holds. Runs in the engine's environment.

vLLM-Omni fuses layers (q, k and v in one) and splits them over tensor-parallel ranks. Here every weight goes by the
name that it trains under, as a view of what vLLM-Omni computes with.
"""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.runtime.engine_host.received import read_weights
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest

__all__ = ["ADAPTER", "WorkerExtension", "held_weights"]

ADAPTER = LoRARequest("unirl", 1, "/in-memory")
"""vLLM-Omni's name of the one adapter; its path is never opened."""


def held_weights(module: Any, fused: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Tensor, int | None]]:
    """Name that it trains under, view of what is computed with, and the dim that is split over ranks, of every weight.

    fused: `unirl.engines.vllm_omni.bridge.Bridge.fused`.
    """
    for path, layer in module.named_modules():
        # Where adapters were once on, a wrapper stands in the layer's place.
        path = path.replace(".base_layer", "")
        parent, _, last = path.rpartition(".")
        for name, parameter in layer.named_parameters(recurse=False):
            split = _split_dim(layer, parameter)
            if last in fused and isinstance(layer, LinearBase):
                pieces = parameter.data.split(list(layer.output_partition_sizes))
                for part, piece in zip(fused[last], pieces, strict=True):
                    yield f"{parent}.{part}.{name}", piece, split
            else:
                yield f"{path}.{name}" if path else name, parameter.data, split


def renamed(name: str, fused: Mapping[str, Sequence[str]]) -> str:
    """A weight's name with its layer as vLLM-Omni calls it, where vLLM-Omni did not make one of several."""
    for last, parts in fused.items():
        if len(parts) == 1:
            name = name.replace(f".{parts[0]}.", f".{last}.")
    return name


def reached_twice(module: Any) -> set[str]:
    """Names of the layers that have another one as well. Adapters are put on names, one by one."""
    names = {id(layer): path.replace(".base_layer", "") for path, layer in module.named_modules()}
    found: set[str] = set()
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, LinearBase) and path.replace(".base_layer", "") != names[id(layer)]:
            found.add(names[id(layer)])
    return found


def _layer(name: str) -> str:
    """The layer of an adapter's A or B."""
    return name.rpartition(".lora_")[0]


def _split_dim(layer: Any, parameter: Tensor) -> int | None:
    """Dim of a parameter that ranks share, rank after rank."""
    if isinstance(layer, ColumnParallelLinear) and layer.tp_size > 1:
        return 0
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and parameter.ndim == 2:
        return 1
    return None


class WorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker class, so its names begin with `unirl_`."""

    model_runner: Any
    lora_manager: Any

    def unirl_inventory(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and whole shape of every weight that trains."""
        found: list[tuple[str, str, list[int]]] = []
        for name, held, split in self._unirl_held():
            shape = list(held.shape)
            if split is not None:
                shape[split] *= self._unirl_ranks()
            found.append((name, str(held.dtype).removeprefix("torch."), shape))
        return found

    def unirl_load_full(self, paths: Sequence[str], expected: str, version: int) -> None:
        """Take all weights from these files. Raises ValueError, before anything changes, for bytes that are not those
        of the checksum or names that are not held; RuntimeError when something else is held afterwards."""
        tensors = read_weights(paths, expected)
        if tensors.keys() != {name for name, _, _ in self._unirl_held()}:
            raise ValueError("weights of other names than those held were sent.")
        pipeline = self.model_runner.pipeline
        pipeline.unirl_torn = f"the sync of version {version} did not come to its end."
        self._unirl_drop_adapter()
        with torch.inference_mode(False), torch.no_grad():
            for name, held, split in self._unirl_held():
                held.copy_(self._unirl_share(tensors[name], split))
        for name, held, split in self._unirl_held():
            if not torch.equal(held.to("cpu"), self._unirl_share(tensors[name], split).to(held.dtype)):
                raise RuntimeError(f"{name!r} was loaded, and something else is held.")
        pipeline.unirl_torn, pipeline.unirl_version = "", version

    def unirl_load_lora(self, paths: Sequence[str], expected: str, version: int, scale: float) -> None:
        """Take the adapter from these files in place of the one before. Raises as `unirl_load_full`."""
        tensors = read_weights(paths, expected)
        pipeline = self.model_runner.pipeline
        bridge, module = pipeline.bridge, getattr(pipeline, pipeline.bridge.module)
        layers = sorted({_layer(name) for name in tensors})
        if twice := sorted(reached_twice(module).intersection(layers)):
            raise ValueError(
                f"weights for an adapter of {twice[0]!r} were sent; vLLM-Omni has that layer under two names, and puts "
                "an adapter on one of them. Leave the layer out of backend.lora.targets."
            )
        # A copy: vLLM multiplies the scale into B in place.
        held_as = {renamed(name, bridge.fused): value.clone() for name, value in tensors.items()}
        rank = next(iter(tensors.values())).shape[0]
        # vLLM-Omni takes names for regular expressions that follow a dot.
        targets = sorted({re.escape(_layer(name)) for name in held_as})
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=targets)
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=ADAPTER.lora_int_id,
            tensors={f"base_model.model.{bridge.module}.{name}": value for name, value in held_as.items()},
            peft_helper=helper,
            device="cpu",
            dtype=self.lora_manager.dtype,
        )
        for weights in lora.loras.values():
            weights.scaling = scale
        pipeline.unirl_torn = f"the sync of version {version} did not come to its end."
        self._unirl_drop_adapter()
        pipeline.unirl_adapter = (lora, helper)
        try:
            self.lora_manager.add_adapter(ADAPTER)
        finally:
            pipeline.unirl_adapter = None
        self.lora_manager.set_active_adapter(ADAPTER, 1.0)
        self._unirl_check_adapter(tensors, layers, scale=scale)
        pipeline.unirl_torn, pipeline.unirl_version = "", version

    def _unirl_check_adapter(self, tensors: Mapping[str, Tensor], layers: Sequence[str], *, scale: float) -> None:
        held = dict(self._unirl_held_adapter())
        dtype = self.lora_manager.dtype
        for layer in layers:
            if layer not in held:
                raise RuntimeError(f"{layer!r} has an adapter, and vLLM-Omni put none on it.")
            down, up = tensors[f"{layer}.lora_A.weight"].to(dtype), tensors[f"{layer}.lora_B.weight"].to(dtype) * scale
            found_down, found_up, split = held[layer]
            # Ranks split what the layer splits: B's rows where it is the outputs, A's columns where it is the inputs.
            wanted_down = self._unirl_share(down, 1 if split == 1 else None)
            wanted_up = self._unirl_share(up, 0 if split == 0 else None)
            rank = down.shape[0]
            same = torch.equal(found_down[:rank].to("cpu"), wanted_down) and torch.equal(
                found_up[:, :rank].to("cpu"), wanted_up
            )
            if not same:
                raise RuntimeError(f"the adapter of {layer!r} was loaded, and something else is held.")

    def _unirl_held_adapter(self) -> Iterator[tuple[str, tuple[Tensor, Tensor, int | None]]]:
        """Layer -> A [rank, in] and scaled B [out, rank] that vLLM-Omni computes with, and the layer's split dim."""
        bridge = self.model_runner.pipeline.bridge
        for path, wrapper in self.lora_manager._lora_modules.items():
            path = path.removeprefix(f"{bridge.module}.")
            parent, _, last = path.rpartition(".")
            split = _split_dim(wrapper.base_layer, wrapper.base_layer.weight)
            for part, down, up in zip(
                bridge.fused.get(last, (last,)), wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True
            ):
                yield f"{parent}.{part}", (down[0, 0], up[0, 0], split)

    def _unirl_drop_adapter(self) -> None:
        if ADAPTER.lora_int_id in self.lora_manager.list_adapters():
            self.lora_manager.remove_adapter(ADAPTER.lora_int_id)

    def _unirl_held(self) -> Iterator[tuple[str, Tensor, int | None]]:
        pipeline = self.model_runner.pipeline
        return held_weights(getattr(pipeline, pipeline.bridge.module), pipeline.bridge.fused)

    def _unirl_share(self, whole: Tensor, split: int | None) -> Tensor:
        """This rank's part of a tensor."""
        return whole if split is None else whole.chunk(self._unirl_ranks(), dim=split)[self._unirl_rank()]

    def _unirl_ranks(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_world_size

        return get_tensor_model_parallel_world_size()

    def _unirl_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()
