"""Extension of vLLM's worker that loads weights and reports those held. Runs in the engine's environment.

vLLM fuses layers (q, k and v in one; gate and up in one), pads the vocabulary, and splits layers over tensor-parallel
ranks. Here every weight is a view of vLLM's tensor under its checkpoint name, with this rank's share of the whole.
"""

# vLLM is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from unirl.core.types.weights import checksum
from unirl.engine_host.cpu_experts import keep_experts
from unirl.engine_host.frames import answers_errors
from unirl.engine_host.host_memory import ReleasedMemory
from unirl.engine_host.received import WeightFiles, read_weights

from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.utils import get_packed_modules_mapping
from vllm.platforms import current_platform

__all__ = ["ADAPTER", "Share", "WorkerExtension", "held_weights"]

ADAPTER = 1
"""vLLM's id for the one adapter."""
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""Fused experts in vLLM -> in transformers, of the same layout: [E, 2 I, H] and [E, H, I]."""

if current_platform.is_cpu():

    def _keep_weight(_: Any, layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    select_kernel = unquantized_fused_moe_method.select_unquantized_moe_backend

    def _select_kernel(moe_config: Any) -> Any:
        return select_kernel(moe_config=dataclasses.replace(moe_config, is_lora_enabled=False))

    # Otherwise vLLM computes with copies of the weights packed for oneDNN. Those of linear layers replace the weight,
    # which could no longer be read; that of a tied output layer would keep its old values.
    LinearBase._cpu_skip_gemm_dispatch = True
    UnquantizedEmbeddingMethod.process_weights_after_loading = _keep_weight
    keep_experts()
    # With LoRA enabled vLLM would run experts on Triton, which has no CPU. Adapters of linear layers stay possible.
    unquantized_fused_moe_method.select_unquantized_moe_backend = _select_kernel
    for adapted in (FusedMoEWithLoRA, FusedMoE3DWithLoRA):
        adapted.can_replace_layer = classmethod(lambda *_, **__: False)


class Share(NamedTuple):
    """What one rank has of a weight: rows, columns, or everything."""

    dim: int = 0
    size: int = 0
    """Of the whole weight along `dim`; 0 for a weight that every rank has whole."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Start and length along `dim` of what is here, in order."""

    def of(self, whole: Tensor) -> Tensor:
        if not self.size:
            return whole
        return torch.cat([whole.narrow(self.dim, start, length) for start, length in self.ranges], dim=self.dim)

    def whole_shape(self, held: Tensor) -> list[int]:
        shape = list(held.shape)
        if self.size:
            shape[self.dim] = self.size
        return shape


WHOLE = Share()


def held_weights(model: Any) -> Iterator[tuple[str, Tensor, Share]]:
    """Checkpoint name and a view of every weight that vLLM computes with on this rank."""
    prefixes = {held: checkpoint for checkpoint, held in _prefixes(model).items()}
    return ((_renamed(name, prefixes), value, share) for name, value, share in _pieces(model))


def _prefixes(model: Any) -> dict[str, str]:
    """Beginning of a name in the checkpoint -> in vLLM; of two that vLLM names alike, the longest, which is today's."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    pairs = {} if mapper is None else mapper.orig_to_new_prefix
    longest = {held: checkpoint for checkpoint, held in sorted(pairs.items(), key=lambda pair: len(pair[0]))}
    return {checkpoint: held for held, checkpoint in longest.items() if held is not None}


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _pieces(model: Any) -> Iterator[tuple[str, Tensor, Share]]:
    """As `held_weights`, with vLLM's prefixes."""
    # A model's own, or those of the models within it.
    packed: Mapping[str, Sequence[str]] = get_packed_modules_mapping(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        # With LoRA enabled, a wrapper replaces the layer.
        path = path.replace(".base_layer", "")
        parent, _, last = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            # A tied weight is listed under its first name, as in torch.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, RoutedExperts):
                own = f"{path.removesuffix('.routed_experts')}.{EXPERTS.get(name, name)}"
                yield own, parameter, _share_of_experts(module, name, parameter)
            elif isinstance(module, VocabParallelEmbedding):
                rows = module.shard_indices
                start, length = rows.org_vocab_start_index, rows.num_org_elements
                share = Share(0, module.org_vocab_size, ((start, length),)) if module.tp_size > 1 else WHOLE
                yield f"{path}.{name}", parameter[:length], share
            elif isinstance(module, LinearBase):
                shares = _shares(module, parameter)
                # Named alike, a layer is fused in the checkpoint too.
                if packed.get(last, [last]) == [last]:
                    yield f"{path}.{name}", parameter, _fused(shares)
                    continue
                pieces = parameter.split(list(module.output_partition_sizes))
                for part, piece, share in zip(packed[last], pieces, shares, strict=True):
                    yield f"{parent}.{part}.{name}", piece, share
            else:
                yield f"{path}.{name}", parameter, WHOLE


def _shares(layer: Any, parameter: Tensor) -> list[Share]:
    """This rank's share of each part of a linear layer's weight or bias."""
    ranks, rank = layer.tp_size, layer.tp_rank
    if ranks > 1 and isinstance(layer, ColumnParallelLinear):
        sizes: list[int] = list(layer.output_partition_sizes)
        # With fewer heads of keys and values than ranks, neighbours have the same ones.
        copies = [1] * len(sizes)
        if isinstance(layer, QKVParallelLinear):
            copies[1:] = [layer.num_kv_head_replicas] * (len(sizes) - 1)
        return [
            Share(0, size * (ranks // copy), ((size * (rank // copy), size),))
            for size, copy in zip(sizes, copies, strict=True)
        ]
    if ranks > 1 and isinstance(layer, RowParallelLinear) and parameter.ndim == 2:
        columns = parameter.shape[1]
        return [Share(1, columns * ranks, ((columns * rank, columns),))]
    return [WHOLE] * len(getattr(layer, "output_partition_sizes", (0,)))


def _fused(shares: Sequence[Share]) -> Share:
    """The share of a weight that has these parts one below the other."""
    if len(shares) == 1 or not shares[0].size:
        return shares[0]
    ranges: list[tuple[int, int]] = []
    above = 0
    for share in shares:
        ranges += [(above + start, length) for start, length in share.ranges]
        above += share.size
    return Share(0, above, tuple(ranges))


def _share_of_experts(module: Any, name: str, parameter: Tensor) -> Share:
    """Of gate and up [E, 2 I, H] in one, each split, and of down [E, H, I]; others are whole."""
    ranks, rank = module.moe_config.tp_size, module.moe_config.tp_rank
    if ranks == 1 or name not in EXPERTS:
        return WHOLE
    if name == "w2_weight":
        columns = parameter.shape[2]
        return Share(2, columns * ranks, ((columns * rank, columns),))
    rows = parameter.shape[1] // 2
    return Share(1, 2 * rows * ranks, ((rows * rank, rows), (rows * (ranks + rank), rows)))


class WorkerExtension:
    """Mixed into vLLM's worker class, so its names begin with `unirl_`."""

    model_runner: Any
    unirl_read: dict[tuple[str, ...], str]
    unirl_noted: dict[str, tuple[list[int], str, float]]
    unirl_released: dict[str, ReleasedMemory]

    def unirl_inventory(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape, before it was split, of every weight."""
        held = held_weights(self.model_runner.get_model())
        return [
            (name, str(value.dtype).removeprefix("torch."), share.whole_shape(value)) for name, value, share in held
        ]

    def unirl_watch(self) -> None:
        """From now on, record the prompt, media and temperature with which the model runner computes each request."""
        runner, noted = self.model_runner, dict[str, tuple[list[int], str, float]]()
        # Images of one identifier are encoded once, from the first request that has them.
        read = self.unirl_read = dict[tuple[str, ...], str]()
        execute = runner.execute_model

        def watched(scheduled: Any, *others: Any, **named: Any) -> Any:
            for new in scheduled.scheduled_new_reqs:
                # vLLM appends eight random characters to a request's id.
                name = new.req_id.rpartition("-")[0] or new.req_id
                images = tuple(feature.identifier for feature in new.mm_features)
                if images not in read:
                    read[images] = _key_of(new.mm_features)
                noted[name] = (list(new.prompt_token_ids), read[images], float(new.sampling_params.temperature))
            return execute(scheduled, *others, **named)

        runner.execute_model, self.unirl_noted = watched, noted

    def unirl_used(self) -> dict[str, tuple[list[int], str, float]]:
        """Request id -> prompt tokens, key of the images' tensors, and temperature, for requests since the last
        call."""
        used = dict(self.unirl_noted)
        self.unirl_noted.clear()
        self.unirl_read.clear()
        return used

    def unirl_release(self) -> None:
        """On a CPU, where vLLM's `sleep` releases nothing, release the weights and the KV cache."""
        if current_platform.is_cpu():
            runner = self.model_runner
            weights = [*runner.get_model().parameters(), *runner.get_model().buffers(), *_adapter_memory(runner)]
            self.unirl_released = {
                "weights": ReleasedMemory(kept=weights),
                "kv_cache": ReleasedMemory(kept=(), dropped=runner.kv_caches),
            }

    def unirl_restore(self, part: str) -> None:
        if current_platform.is_cpu():
            self.unirl_released.pop(part).restore()

    @answers_errors
    def unirl_load_full(self, paths: Sequence[str], expected: str) -> None:
        """Load all weights from these files. Raises Unchanged for a wrong checksum, RuntimeError when the weights held
        afterwards differ."""
        files = WeightFiles(paths, expected, device=self.device)  # type: ignore[attr-defined]
        self.reload_weights(weights_iterator=iter(files))  # type: ignore[attr-defined]
        held = {name: (value, share) for name, value, share in held_weights(self.model_runner.get_model())}
        for name, sent in files:
            value, share = held[name]
            if not torch.equal(value, share.of(sent).to(value)):
                raise RuntimeError(f"{name!r} was loaded, but the weight held differs from it.")

    @answers_errors
    def unirl_load_lora(self, paths: Sequence[str], expected: str, scale: float) -> None:
        """Load the adapter from these files, replacing the previous one. Raises as `unirl_load_full`."""
        tensors = read_weights(paths, expected)
        rank = next(iter(tensors.values())).shape[0]
        adapters = self.model_runner.lora_manager._adapter_manager
        dtype = self.model_runner.lora_manager.lora_config.lora_dtype
        layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
        prefixes = _prefixes(self.model_runner.get_model())
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=ADAPTER,
            # A copy: vLLM multiplies the scale into B in place.
            tensors={f"base_model.model.{_renamed(name, prefixes)}": value.clone() for name, value in tensors.items()},
            peft_helper=PEFTHelper(
                r=rank, lora_alpha=rank, target_modules=[_renamed(layer, prefixes) for layer in layers]
            ),
            device="cpu",
            dtype=dtype,
        )
        for weights in lora.loras.values():
            weights.scaling = scale
        adapters.remove_adapter(ADAPTER)
        adapters.add_adapter(lora)
        adapters.activate_adapter(ADAPTER)
        held = {layer: found for layer, *found in _held_adapter(adapters, rank)}
        for layer in layers:
            down = tensors[f"{layer}.lora_A.weight"].to(dtype)
            up = tensors[f"{layer}.lora_B.weight"].to(dtype) * scale
            if (place := _renamed(layer, prefixes)) not in held:
                raise RuntimeError(f"{layer!r} has an adapter in the update, but vLLM did not apply it.")
            found_down, found_up, share = held[place]
            # Split as the layer is: B's rows with its outputs, A's columns with its inputs.
            if share.size and share.dim == 0:
                up = share.of(up)
            elif share.size:
                down = share.of(down)
            if not (torch.equal(found_down.to("cpu"), down) and torch.equal(found_up.to("cpu"), up)):
                raise RuntimeError(f"the adapter of {layer!r} was loaded, but the weights held differ from it.")


def _key_of(features: Sequence[Any]) -> str:
    """Checksum of the tensors that these images are encoded from, as the host makes keys of them; empty without."""
    items = [feature.data for feature in features]
    if not items:
        return ""
    # Images of one row were one tensor, of which each has its part.
    names = list(items[0])
    return checksum({name: items[0][name].field.reduce_data([item[name] for item in items]) for name in names})


def _adapter_memory(runner: Any) -> Iterator[Tensor]:
    """The tensors of the slots for adapters."""
    manager = getattr(runner, "lora_manager", None)
    for module in [] if manager is None else manager._adapter_manager.modules.values():
        yield from (*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ()))


def _held_adapter(adapters: Any, rank: int) -> Iterator[tuple[str, Tensor, Tensor, Share]]:
    """Layer, A [rank, in] and scaled B [out, rank] that vLLM computes with, and the share of the layer's weight."""
    slot = adapters.lora_index_to_id.index(ADAPTER)
    for path, module in adapters.modules.items():
        if not hasattr(module, "lora_a_stacked") or not isinstance(module.base_layer, LinearBase):
            continue
        parent, _, last = path.rpartition(".")
        # vLLM stores the full paths of a fused layer's parts.
        parts = [name.rpartition(".")[2] for name in adapters.packed_modules.get(path, [last])]
        shares = _shares(module.base_layer, module.base_layer.weight)
        if len(parts) == 1:
            shares = [_fused(shares)]
        for part, share, down, up in zip(parts, shares, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            yield f"{parent}.{part}", down[slot, 0, :rank], up[slot, 0, :, :rank], share
