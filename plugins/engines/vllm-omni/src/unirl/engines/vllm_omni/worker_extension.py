"""Extension of vLLM-Omni's worker that loads weights and reports those held. Runs in the engine's environment.

vLLM-Omni fuses layers (q, k and v in one) and splits them over tensor-parallel ranks. Here every weight is a view of
vLLM-Omni's tensor under its training name.
"""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.engine_host.frames import Unchanged, answers_errors
from unirl.engine_host.received import WeightFiles, read_weights
from unirl.engine_host.serving import rendezvous
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest
from vllm_omni.platforms import current_omni_platform

__all__ = ["ADAPTER", "WorkerExtension", "held_weights"]

ADAPTER = LoRARequest("unirl", 1, "/in-memory")
"""vLLM-Omni's name for the one adapter; its path is never opened."""


def held_weights(module: Any, fused: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Tensor, int | None]]:
    """For every weight: its training name, a view of the tensor in use, and the dim that is split over ranks.

    fused: `unirl.engines.vllm_omni.bridge.Bridge.fused`.
    """
    for path, layer in module.named_modules():
        # A layer that once had an adapter stays wrapped.
        trained = trained_names(path.replace(".base_layer", ""), fused)
        for name, parameter in layer.named_parameters(recurse=False):
            split = _split_dim(layer, parameter)
            full = f"{path}.{name}"
            if (other := trained_names(full, fused)) != (full,):
                yield other[0], parameter.data, split
                continue
            if split is not None and len(trained) == 1 and len(getattr(layer, "output_partition_sizes", ())) > 1:
                raise RuntimeError(
                    f"{path!r} has several parts, each split over ranks, which the bridge does not name. "
                    "Set engine.tensor_parallel=1."
                )
            pieces = [parameter.data]
            if len(trained) > 1:
                pieces = parameter.data.split(list(layer.output_partition_sizes))
            for own, piece in zip(trained, pieces, strict=True):
                yield f"{own}.{name}" if own else name, piece, split


def trained_names(path: str, fused: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of the trained module's layers that vLLM-Omni's layer at `path` stands for."""
    for end, parts in fused.items():
        if path == end or path.endswith(f".{end}"):
            return tuple((path.removesuffix(end) + part).rstrip(".") for part in parts)
    return (path,)


def renamed(name: str, fused: Mapping[str, Sequence[str]]) -> str:
    """A weight's name with the layer renamed as in vLLM-Omni, except for fused layers."""
    for end, parts in fused.items():
        if len(parts) == 1:
            name = name.replace(f".{parts[0]}.", f".{end}.")
    return name


def trained_modules(pipeline: Any) -> dict[str, Any]:
    """Prefix of the weights' names -> a trained module of vLLM-Omni's pipeline."""
    names: str | tuple[str, ...] = pipeline.bridge.module
    if isinstance(names, str):
        return {"": getattr(pipeline, names)}
    return {f"{name}.": getattr(pipeline, name) for name in names}


def reached_twice(module: Any) -> set[str]:
    """Layers reachable under more than one name. Adapters are applied per name."""
    names = {id(layer): path.replace(".base_layer", "") for path, layer in module.named_modules()}
    result: set[str] = set()
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, LinearBase) and path.replace(".base_layer", "") != names[id(layer)]:
            result.add(names[id(layer)])
    return result


def _layer(name: str) -> str:
    """The layer of an adapter's A or B."""
    return name.rpartition(".lora_")[0]


def _split_dim(layer: Any, parameter: Tensor) -> int | None:
    """Dim along which a parameter is sharded over ranks."""
    if isinstance(layer, ColumnParallelLinear) and layer.tp_size > 1:
        return 0
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and parameter.ndim == 2:
        return 1
    return None


class WorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker class, so its own names begin with `unirl_`."""

    model_runner: Any
    lora_manager: Any
    local_rank: int
    rank: int
    od_config: Any

    def init_device(self) -> None:
        """Form torch's process group, which vLLM-Omni then uses instead of one that meets at a TCP store."""
        current_omni_platform.set_device(current_omni_platform.get_torch_device(self.local_rank))
        torch.distributed.init_process_group(
            backend=current_omni_platform.dist_backend,
            init_method=rendezvous(),
            world_size=self.od_config.num_gpus,
            rank=self.rank,
        )
        super().init_device()

    def unirl_inventory(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and unsharded shape of every trained weight."""
        result: list[tuple[str, str, list[int]]] = []
        for name, held, split in self._unirl_held():
            shape = list(held.shape)
            if split is not None:
                shape[split] *= self._unirl_ranks()
            result.append((name, str(held.dtype).removeprefix("torch."), shape))
        return result

    def unirl_max_model_len(self) -> int:
        """Positions of the checkpoint of a model that writes."""
        pipeline = self.model_runner.pipeline
        return pipeline.bridge.max_model_len(pipeline)

    @answers_errors
    def unirl_load_full(self, paths: Sequence[str], expected: str, version: int) -> None:
        """Load all weights from these files. Rejects a wrong checksum and unknown names; raises RuntimeError when the
        weights held afterwards differ."""
        held = {name: (weight, split) for name, weight, split in self._unirl_held()}
        files = WeightFiles(paths, expected, device=self.device)
        if files.names != held.keys():
            raise Unchanged("the names of the weights sent are not those of the weights held.")
        pipeline = self.model_runner.pipeline
        pipeline.unirl_torn = f"the sync of version {version} did not complete."
        self._unirl_drop_adapter()
        with torch.inference_mode(False), torch.no_grad():
            for name, sent in files:
                weight, split = held[name]
                weight.copy_(self._unirl_share(sent, split))
        # Looked up again: what was written may have been a copy.
        held = {name: (weight, split) for name, weight, split in self._unirl_held()}
        for name, sent in files:
            weight, split = held[name]
            if not torch.equal(weight, self._unirl_share(sent, split).to(weight)):
                raise RuntimeError(f"{name!r} was loaded, but the weight held differs from it.")
        pipeline.unirl_torn, pipeline.unirl_version = "", version

    @answers_errors
    def unirl_load_lora(self, paths: Sequence[str], expected: str, version: int, scale: float) -> None:
        """Load the adapter from these files, replacing the previous one. Raises as `unirl_load_full`."""
        tensors = read_weights(paths, expected)
        pipeline = self.model_runner.pipeline
        bridge = pipeline.bridge
        layers = sorted({_layer(name) for name in tensors})
        modules = trained_modules(pipeline)
        doubled = {prefix + name for prefix, module in modules.items() for name in reached_twice(module)}
        if twice := sorted(doubled.intersection(layers)):
            raise Unchanged(
                f"got an adapter for {twice[0]!r}, which vLLM-Omni has under two names; it would apply the adapter to "
                "only one of them. Remove the layer from backend.lora.targets."
            )
        # A copy: vLLM multiplies the scale into B in place.
        held_as = {renamed(name, bridge.fused): value.clone() for name, value in tensors.items()}
        rank = next(iter(tensors.values())).shape[0]
        # vLLM-Omni treats names as regular expressions after a dot, and looks for them in each module.
        inner = (_layer(name).removeprefix(p) for name in held_as for p in modules if name.startswith(p))
        targets = sorted({re.escape(layer) for layer in inner})
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=targets)
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=ADAPTER.lora_int_id,
            tensors={f"base_model.model.{self._unirl_component()}{name}": value for name, value in held_as.items()},
            peft_helper=helper,
            device="cpu",
            dtype=self.lora_manager.dtype,
        )
        for weights in lora.loras.values():
            weights.scaling = scale
        pipeline.unirl_torn = f"the sync of version {version} did not complete."
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
                raise RuntimeError(f"{layer!r} has an adapter in the update, but vLLM-Omni did not apply it.")
            down, up = tensors[f"{layer}.lora_A.weight"].to(dtype), tensors[f"{layer}.lora_B.weight"].to(dtype) * scale
            found_down, found_up, split = held[layer]
            # Sharded like the layer: B's rows if it splits its outputs, A's columns if it splits its inputs.
            wanted_down = self._unirl_share(down, 1 if split == 1 else None)
            wanted_up = self._unirl_share(up, 0 if split == 0 else None)
            rank = down.shape[0]
            same = torch.equal(found_down[:rank].to("cpu"), wanted_down) and torch.equal(
                found_up[:, :rank].to("cpu"), wanted_up
            )
            if not same:
                raise RuntimeError(f"the adapter of {layer!r} was loaded, but the weights held differ from it.")

    def _unirl_held_adapter(self) -> Iterator[tuple[str, tuple[Tensor, Tensor, int | None]]]:
        """Layer -> A [rank, in] and scaled B [out, rank] that vLLM-Omni computes with, and the layer's split dim."""
        bridge = self.model_runner.pipeline.bridge
        for path, wrapper in self.lora_manager._lora_modules.items():
            trained = trained_names(path.removeprefix(self._unirl_component()), bridge.fused)
            split = _split_dim(wrapper.base_layer, wrapper.base_layer.weight)
            for own, down, up in zip(trained, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True):
                yield own, (down[0, 0], up[0, 0], split)

    def _unirl_component(self) -> str:
        """Prefix of vLLM-Omni's layer names that the weights' names do not have."""
        names: str | tuple[str, ...] = self.model_runner.pipeline.bridge.module
        return f"{names}." if isinstance(names, str) else ""

    def _unirl_drop_adapter(self) -> None:
        if ADAPTER.lora_int_id in self.lora_manager.list_adapters():
            self.lora_manager.remove_adapter(ADAPTER.lora_int_id)

    def _unirl_held(self) -> Iterator[tuple[str, Tensor, int | None]]:
        pipeline = self.model_runner.pipeline
        for prefix, module in trained_modules(pipeline).items():
            for name, held, split in held_weights(module, pipeline.bridge.fused):
                yield prefix + name, held, split

    def _unirl_share(self, whole: Tensor, split: int | None) -> Tensor:
        """This rank's shard of a tensor."""
        return whole if split is None else whole.chunk(self._unirl_ranks(), dim=split)[self._unirl_rank()]

    def _unirl_ranks(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_world_size

        return get_tensor_model_parallel_world_size()

    def _unirl_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()
