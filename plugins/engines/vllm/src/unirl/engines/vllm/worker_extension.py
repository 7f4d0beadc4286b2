"""What is added to vLLM's worker: taking weights, and saying which it holds. Runs in the engine's environment.

vLLM fuses layers (q, k and v in one; gate and up in one) and pads the vocabulary. Here every weight goes by the name
that it has in the checkpoint, as a view of what vLLM computes with.
"""

# vLLM is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.runtime.engine_host.received import read_weights

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

__all__ = ["ADAPTER", "WorkerExtension", "held_weights"]

ADAPTER = 1
"""vLLM's number of the one adapter."""

if current_platform.is_cpu():

    def _keep_weight(_: Any, layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # Else vLLM computes with copies of the weights, packed for oneDNN: those of linear layers take the place of the
    # weight, which could no longer be read; that of a tied output layer would stay as it is when weights come.
    LinearBase._cpu_skip_gemm_dispatch = True
    UnquantizedEmbeddingMethod.process_weights_after_loading = _keep_weight


def held_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name in the checkpoint, and view of the weight that vLLM computes with, of all of them."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for path, module in model.named_modules():
        # Where adapters are on, a wrapper stands in the layer's place.
        path = path.replace(".base_layer", "")
        parent, _, last = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            # A tied weight goes by its first name, as in torch.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if last in packed and isinstance(module, LinearBase):
                sizes = list(module.output_partition_sizes)
                for part, piece in zip(packed[last], parameter.split(sizes), strict=True):
                    yield f"{parent}.{part}.{name}", piece
            elif isinstance(module, VocabParallelEmbedding):
                yield f"{path}.{name}", parameter[: module.org_vocab_size]
            else:
                yield f"{path}.{name}", parameter


class WorkerExtension:
    """Mixed into vLLM's worker class, so its names begin with `unirl_`."""

    model_runner: Any

    def unirl_inventory(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of every weight."""
        held = held_weights(self.model_runner.get_model())
        return [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in held]

    def unirl_load_full(self, paths: Sequence[str], expected: str) -> None:
        """Take all weights from these files. Raises ValueError, before anything changes, for bytes that are not those
        of the checksum; RuntimeError when something else is held afterwards."""
        tensors = read_weights(paths, expected)
        self.reload_weights(weights_iterator=iter(tensors.items()))  # type: ignore[attr-defined]
        held = dict(held_weights(self.model_runner.get_model()))
        for name, sent in tensors.items():
            if not torch.equal(held[name], sent.to(held[name])):
                raise RuntimeError(f"{name!r} was loaded, and something else is held.")

    def unirl_load_lora(self, paths: Sequence[str], expected: str, scale: float) -> None:
        """Take the adapter from these files in place of the one before. Raises as `unirl_load_full`."""
        tensors = read_weights(paths, expected)
        rank = next(iter(tensors.values())).shape[0]
        adapters = self.model_runner.lora_manager._adapter_manager
        dtype = self.model_runner.lora_manager.lora_config.lora_dtype
        layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=ADAPTER,
            # A copy: vLLM multiplies the scale into B in place.
            tensors={f"base_model.model.{name}": value.clone() for name, value in tensors.items()},
            peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=layers),
            device="cpu",
            dtype=dtype,
        )
        for weights in lora.loras.values():
            weights.scaling = scale
        adapters.remove_adapter(ADAPTER)
        adapters.add_adapter(lora)
        adapters.activate_adapter(ADAPTER)
        held = dict(_held_adapter(adapters, rank))
        for layer in layers:
            down = tensors[f"{layer}.lora_A.weight"].to(dtype)
            up = tensors[f"{layer}.lora_B.weight"].to(dtype) * scale
            if layer not in held:
                raise RuntimeError(f"{layer!r} has an adapter, and vLLM put none on it.")
            found_down, found_up = (value.to("cpu") for value in held[layer])
            if not (torch.equal(found_down, down) and torch.equal(found_up, up)):
                raise RuntimeError(f"the adapter of {layer!r} was loaded, and something else is held.")


def _held_adapter(adapters: Any, rank: int) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Layer -> A [rank, in] and scaled B [out, rank] that vLLM computes with."""
    slot = adapters.lora_index_to_id.index(ADAPTER)
    for path, module in adapters.modules.items():
        if not hasattr(module, "lora_a_stacked") or not isinstance(module.base_layer, LinearBase):
            continue
        parent, _, last = path.rpartition(".")
        # vLLM keeps full paths of the parts of a fused layer.
        parts = [name.rpartition(".")[2] for name in adapters.packed_modules.get(path, [last])]
        for part, down, up in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            yield f"{parent}.{part}", (down[slot, 0, :rank], up[slot, 0, :, :rank])
