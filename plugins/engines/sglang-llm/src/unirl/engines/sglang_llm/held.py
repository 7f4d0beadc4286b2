"""SGLang's weights under their checkpoint names, and weight loading. SGLang calls these functions in its scheduler
process as custom loaders (`custom_weight_loader`).

SGLang fuses layers (q, k and v in one; gate and up in one) and pads the vocabulary and, on a CPU, the experts. Here
every weight is a view of SGLang's tensor, or a copy without its padding. The experts of a layer are in one tensor in
training, too. Loaders return nothing, so each writes its answer as JSON to a given file. Runs in the engine's
environment.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.managers import mm_schedule
from torch import Tensor
from unirl.engine_host.frames import UNCHANGED, Unchanged
from unirl.engine_host.received import WeightFiles, read_weights

__all__ = ["check_adapter", "held_weights", "list_weights", "load_full"]

PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Beginning of a name in training -> in SGLang, for models that read images."""
UNITS = tuple(f".mlp.{name}" for name in ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias"))
UNITS += (".mlp.down_proj.weight",)
"""Weights of a vision tower with a row or column per unit of its MLPs, whose number SGLang rounds up."""
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused layer -> its parts, as checkpoints in the transformers layout name them."""
EXPERTS = {".experts.w13_weight": ".experts.gate_up_proj", ".experts.w2_weight": ".experts.down_proj"}
"""End of a name in SGLang -> in training, for the experts of a layer: [experts, 2 x inner, width], gate before up, and
[experts, width, inner]."""


def held_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name and a view of every weight that SGLang computes with."""
    return ((_trained_name(model, name), _unpadded(model, name, value)) for name, value in _held(model))


def _unpadded(model: Any, name: str, value: Tensor) -> Tensor:
    """Without the units that SGLang adds to experts on a CPU and to the MLPs of a vision tower. name: SGLang's."""
    if name.endswith(tuple(EXPERTS)):
        size = _original(model.config, "moe_intermediate_size")
        if name.endswith("w2_weight"):
            return value[:, :, :size]
        gate, up = value.chunk(2, dim=1)
        return value if gate.shape[1] == size else torch.cat([gate[:, :size], up[:, :size]], dim=1)
    if not name.startswith("visual.blocks.") or not name.endswith(UNITS):
        return value
    size = _original(model.config.vision_config, "intermediate_size")
    return value[:, :size] if name.endswith("down_proj.weight") else value[:size]


def _original(config: Any, key: str) -> int:
    """A size of the checkpoint's config, which SGLang replaces where it pads."""
    return getattr(config, f"original_{key}", getattr(config, key))


def _trained_name(model: Any, name: str) -> str:
    """The name in training of one of SGLang's."""
    for held, trained in EXPERTS.items():
        if name.endswith(held):
            return name.removesuffix(held) + trained
    if not hasattr(model, "visual"):
        return name
    for trained, held in PREFIXES.items():
        if name.startswith(held):
            return trained + name.removeprefix(held).replace(".attn.qkv_proj.", ".attn.qkv.")
    return name


def _held_name(model: Any, name: str) -> str:
    """SGLang's name of one in training."""
    for trained, held in PREFIXES.items():
        if hasattr(model, "visual") and name.startswith(trained):
            return held + name.removeprefix(trained)
    return name


def _loadable(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight as checkpoints have it, which SGLang's loader takes: of experts one by one. name: SGLang's otherwise."""
    place, _, last = name.rpartition(".")
    if not name.endswith(tuple(EXPERTS.values())):
        yield name, value
        return
    for expert, whole in enumerate(value):
        parts = {"down_proj": whole}
        if last == "gate_up_proj":
            parts = dict(zip(PARTS[last], whole.chunk(2), strict=True))
        yield from ((f"{place}.{expert}.{part}.weight", piece) for part, piece in parts.items())


def _held(model: Any) -> Iterator[tuple[str, Tensor]]:
    """As `held_weights`, with SGLang's prefixes."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            # A wrapper exposes the weight of the layer inside it, which comes next.
            continue
        path = path.replace(".base_layer", "")
        for name, parameter in module.named_parameters(recurse=False):
            # A tied weight is listed under its first name, as in torch.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, VocabParallelEmbedding):
                yield f"{path}.{name}", parameter[: module.org_vocab_size]
            else:
                for part, piece in _pieces(path, module, parameter):
                    yield f"{part}.{name}", piece


def list_weights(model: Any, asked: Sequence[tuple[str, Tensor]]) -> None:
    """Reports name, dtype and shape of every weight."""

    def answer(_: Mapping[str, Any]) -> Any:
        held = held_weights(model)
        return [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in held]

    _answered(asked, answer)


def load_full(model: Any, asked: Sequence[tuple[str, Tensor]]) -> None:
    """Loads all weights from files. Raises Unchanged for a wrong checksum, RuntimeError when the weights held
    afterwards differ."""

    def answer(told: Mapping[str, Any]) -> None:
        files = WeightFiles(told["paths"], told["checksum"], device=next(model.parameters()).device)
        model.load_weights(pair for name, value in files for pair in _loadable(_held_name(model, name), value))
        # SGLang's own flush leaves the images that the old weights encoded.
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()
        held = dict(held_weights(model))
        for name, sent in files:
            if not torch.equal(held[name], sent.to(held[name])):
                raise RuntimeError(f"{name!r} was loaded, but the weight held differs from the one sent.")

    _answered(asked, answer)


def check_adapter(model: Any, asked: Sequence[tuple[str, Tensor]]) -> None:
    """Compares the adapter used in the last batch, and its scale, with the one in files. Raises RuntimeError when
    they differ."""

    def answer(told: Mapping[str, Any]) -> None:
        tensors = read_weights(told["paths"], told["checksum"])
        sent = {name.rpartition(".lora_")[0] for name in tensors}
        result: set[str] = set()
        for layer, down, up, scale in _held_adapter(model):
            if layer not in sent:
                # Within a fused layer, a part without an adapter has zeros.
                if bool(up.any()):
                    raise RuntimeError(f"{layer!r} has an adapter in SGLang, but not in the update.")
                continue
            result.add(layer)
            expected = (tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"])
            rank = len(expected[0])
            same = all(torch.equal(one, other.to(one)) for one, other in zip((down, up), expected, strict=True))
            # Kept in fp32.
            if not same or scale != float(torch.tensor(told["scale"], dtype=torch.float32)) or len(down) != rank:
                raise RuntimeError(f"the adapter of {layer!r} was loaded, but the weights held differ from it.")
        if missing := sorted(sent - result):
            raise RuntimeError(f"{missing[0]!r} has an adapter in the update, but SGLang did not apply it.")

    _answered(asked, answer)


def _held_adapter(model: Any) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Layer, A [rank, in], B [out, rank] and scale used for the last batch."""
    for path, module in model.named_modules():
        if not isinstance(module, BaseLayerWithLoRA) or not module.set_lora:
            continue
        batch = module.lora_backend.batch_info
        slot = int(batch.weight_indices[0])
        rank, scale = int(batch.lora_ranks[slot]), float(batch.scalings[slot])
        down, up = module.lora_a[slot], module.lora_b[slot][:, :rank]
        parts = PARTS.get(path.rpartition(".")[2], (path.rpartition(".")[2],))
        downs = down[: rank * len(parts)].split(rank)
        for (layer, piece), part in zip(_pieces(path, module.base_layer, up), downs, strict=True):
            yield _trained_name(model, layer), part, piece, scale


def _pieces(path: str, module: Any, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a fused layer, or the layer itself: name and slice of the first dim."""
    parent, _, last = path.rpartition(".")
    # Checkpoints of vision towers have q, k and v in one, too.
    if isinstance(module, LinearBase) and last in PARTS and not (path.startswith("visual.") and last == "qkv_proj"):
        if isinstance(module, QKVParallelLinear):
            sizes = [module.q_proj_shard_size, module.kv_proj_shard_size, module.kv_proj_shard_size]
        else:
            assert isinstance(module, MergedColumnParallelLinear)
            sizes = list(module.output_sizes)
        for part, piece in zip(PARTS[last], rows.split(sizes), strict=True):
            yield f"{parent}.{part}", piece
    else:
        yield path, rows


def _answered(asked: Sequence[tuple[str, Tensor]], answer: Callable[[Mapping[str, Any]], Any]) -> None:
    """Call `answer` with the arguments, sent as JSON in a tensor's name, and write its result or error to the file."""
    told = json.loads(asked[0][0])
    try:
        result = {"value": answer(told)}
    except Exception as error:  # noqa: BLE001 - the server re-raises it; SGLang would end all its processes
        traceback.print_exc()
        result = {"raised": str(error), UNCHANGED: isinstance(error, Unchanged)}
    Path(told["answer"]).write_text(json.dumps(result), encoding="utf-8")
