"""Sizes of a model for `unirl plan`: its weights, and what a row of a stage takes, without running it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.roles import Model, diffusion_model, text_model
from unirl.core.specs.facts import adapted_layers, names_in
from unirl.core.specs.lr_scales import lr_scales_of
from unirl.core.specs.memory import TrainingMemory, quantized_bytes
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, SamplingConfig, TextSamplingConfig
from unirl.loop.costs import latent_step_cost
from unirl.model_host.diffusion.pipeline_model import PipelineModel
from unirl.model_host.shape_run import ForwardSize, shapes_only
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.diffusion.sampler import guidance_of
from unirl.numerics.precision import cast_inputs
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.output_rows import LOGITS_BUDGET

__all__ = ["ModelSize", "model_size"]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model as its checkpoint and the settings of a stage give them. Bytes are of the dtypes it is loaded
    in; a row is one sample at one denoising step, or one text."""

    weight_bytes: int
    """Parameters and buffers of `trainable`, those that are quantized as they are then."""
    buffer_bytes: int
    """Buffers in `weight_bytes`, which are not sharded."""
    trained_bytes: int
    """Parameters in `weight_bytes` that may train."""
    trained_elements: int
    """Number of parameters that may train."""
    frozen_elements: int
    """Of those, parameters that `lr_scales` freezes in full training; they are in fp32, too."""
    adapter_elements: int
    """Number of parameters of LoRA adapters."""
    critic_elements: int
    """Number of parameters of a critic, without its small head: a text model without its output projection, or a
    denoiser. 0 without a critic."""
    critic_tensors: int
    """Number of tensors in `critic_elements`."""
    tuned_tensors: int
    """Number of tensors that the settings train: parameters, or with LoRA those of adapters."""
    block_elements: int
    """Parameters of the largest block that is sharded by itself."""
    root_elements: int
    """Parameters outside of blocks."""
    elements: int
    """All parameters."""
    blocks_bytes: int
    """Parameters in `weight_bytes` that are in blocks and nowhere else."""
    largest_block_bytes: int
    """Those of the largest block."""
    largest_elements: int
    """Elements of the largest tensor that is sent in an update."""
    encode_bytes: int
    """Text encoders and everything else outside of `trainable` that is not a decoder."""
    decode_bytes: int
    """The decoder (VAE)."""
    row_elements: int
    """Elements of a latent; tokens of a text, prompt included, as long as it may get."""
    condition_bytes: int
    """Conditions of one prompt, one branch of the guidance."""
    saved_bytes: int
    """Kept by the forward pass of a row for the backward pass, weights not included."""
    kept_bytes: int
    """The same for a row with blocks that are recomputed: tensors outside of blocks, and the inputs of blocks."""
    block_bytes: int
    """Kept by the largest block for a row."""
    unpacked_bytes: int
    """Weights that the largest block keeps in the dtype that it computes in, for any number of rows, where they are
    held in int8."""
    head_bytes: int
    """Logits of a row's tokens; 0 for latents."""
    most_head_bytes: int
    """Logits that are held at one time."""
    cache_bytes: int
    """Keys and values of a token in a decoder's cache, in the dtype that is computed in; 0 for latents."""
    flops: int
    """Floating-point operations of the forward pass of a row, a multiplication and an addition being two."""
    rollout_rows: int
    """Rows that a sample is generated with."""
    train_rows: int
    """Rows that it is trained on."""
    step_rows: int
    """Those of one of its steps: the branches of the guidance."""
    sde_steps: int
    """Steps with noise of a sample."""
    step_forwards: int
    """Forwards of the model for a step of the rollout: 1, or one for each branch."""
    stored_bytes: int
    """Stored for training per sample: latents of its trajectory, or tokens and their log-probs."""


def model_size(
    model: Model,
    *,
    sampling: SamplingConfig,
    inputs: Inputs,
    memory: TrainingMemory,
    trajectory: Literal["none", "window", "full"] = "window",
) -> ModelSize:
    """The sizes of a model with one row of `sampling`.

    model: may be built without values, and without its encoders and decoder.  inputs: one prompt; the conditions are
    those of its length.  trajectory: latents that the algorithm needs, as `Needs` has it.

    Raises RecipeError for a model whose shapes depend on values, and for LoRA targets that match no layer.
    """
    module = model.trainable
    names = names_in(model.spec.wrap_blocks, module)
    blocks = [part for part in module.modules() if type(part).__name__ in names]
    adapted = _adapted(model, memory)
    quantized = _quantized(blocks) if memory.quantized else []
    params = list(module.parameters())
    trained = [param for param in params if param.requires_grad]
    judging = _critic_params(model) if memory.auxiliary == "critic" else []
    frozen = [] if memory.lora_rank else _freeze(module, memory.lr_scales)
    in_blocks = {id(param) for block in blocks for param in block.parameters()}
    block_bytes = _bytes_of_blocks(module, blocks)
    adapters = [memory.lora_rank * (layer.in_features + layer.out_features) for layer in adapted]
    layers = [memory.lora_rank * max(layer.in_features, layer.out_features) for layer in adapted]
    encode, decode = _other_parts(model)
    forward = _Row(model, memory=memory, blocks=blocks, adapted=adapted, quantized=quantized, trajectory=trajectory)
    try:
        if isinstance(sampling, LatentSamplingConfig):
            forward.latent(inputs, sampling)
        else:
            forward.text(inputs, sampling)
    except RuntimeError as error:
        raise RecipeError(
            f"model: {model.spec.name!r} cannot be run on shapes alone, so its memory cannot be predicted: {error}"
        ) from error
    return ModelSize(
        weight_bytes=_bytes([*params, *module.buffers()]) - sum(_saved(layer, memory.quantized) for layer in quantized),
        buffer_bytes=_bytes(module.buffers()),
        trained_bytes=_bytes(trained),
        trained_elements=_elements(trained),
        frozen_elements=_elements(frozen),
        adapter_elements=sum(adapters),
        critic_elements=sum(judging),
        critic_tensors=len(judging),
        tuned_tensors=2 * len(adapters) if memory.lora_rank else len(trained) - len(frozen),
        block_elements=max((_elements(block.parameters()) for block in blocks), default=0),
        root_elements=sum(param.numel() for param in params if id(param) not in in_blocks),
        elements=_elements(params),
        blocks_bytes=sum(block_bytes),
        largest_block_bytes=max(block_bytes, default=0),
        largest_elements=max(layers) if layers else max(param.numel() for param in params),
        encode_bytes=encode,
        decode_bytes=decode,
        saved_bytes=forward.size.saved_bytes,
        kept_bytes=forward.size.kept_bytes,
        block_bytes=forward.size.block_bytes,
        unpacked_bytes=forward.size.unpacked_bytes,
        flops=forward.size.flops,
        most_head_bytes=4 * LOGITS_BUDGET,
        **forward.row,
    )


class _Row:
    """The forward pass of one row, and what belongs to it."""

    size: ForwardSize
    row: dict[str, int]
    """Fields of `ModelSize` by name."""

    def __init__(
        self,
        model: Model,
        *,
        memory: TrainingMemory,
        blocks: Sequence[nn.Module],
        adapted: Sequence[nn.Linear],
        quantized: Sequence[nn.Linear],
        trajectory: Literal["none", "window", "full"],
    ) -> None:
        self._model, self._blocks = model, blocks
        self._trajectory: Literal["none", "window", "full"] = trajectory
        self._adapted = dict.fromkeys(cast("Sequence[nn.Module]", adapted), memory.lora_rank)
        # The backward pass of nf4 makes the weight again.
        self._unpacked = quantized if memory.quantized == "int8" else ()
        self._dtype = getattr(torch, memory.compute_dtype) if memory.compute_dtype else None

    def latent(self, inputs: Inputs, sampling: LatentSamplingConfig) -> None:
        """Measure a latent of these settings."""
        model = diffusion_model(self._model)
        shape = model.latent_shape(sampling)
        conditions = _conditions(model, inputs, sampling=sampling)
        sigmas = model.schedule(sampling)
        # A model of several denoisers may train only those of one end of the schedule.
        runs: list[ForwardSize] = []
        for sigma in (sigmas[:1], sigmas[-2:-1]):
            with self._shapes() as size:
                model.velocity(torch.zeros(1, *shape), sigma, conditions)
            runs.append(size)
        self.size = max(runs, key=lambda run: run.saved_bytes)
        # Steps and positions are those of any sample, also of one in a tree.
        settings = dataclasses.replace(sampling, sde=dataclasses.replace(sampling.sde, branch_steps=[]))
        request = plan_latents(
            settings,
            sigmas=sigmas,
            latent_shape=shape,
            seed=0,
            rollout=0,
            sample_ids=["sample"],
            group_ids=["group"],
            trajectory=self._trajectory,
        )
        cost = latent_step_cost(request, latent_shape=shape, replayed_share=0.0)
        self.row = {
            "row_elements": prod(shape),
            "condition_bytes": sum(_bytes(_leaves(value)) for value in conditions.values()),
            "head_bytes": 0,
            "cache_bytes": 0,
            "rollout_rows": cost.rollout_rows,
            # A loss that reads no trajectory chooses its own points: one of them, with one branch.
            "train_rows": cost.train_rows or 1,
            "step_rows": request.num_branches if cost.train_rows else 1,
            "sde_steps": int(request.sde_steps.shape[1]),
            "step_forwards": guidance_of(request.sampler).num_forwards,
            "stored_bytes": cost.stored_bytes,
        }

    def text(self, inputs: Inputs, sampling: TextSamplingConfig) -> None:
        """Measure a text of these settings, as long as it may get."""
        model = text_model(self._model)
        if model.spec.inputs:
            raise RecipeError(
                f"model: {model.spec.name!r} reads images with its texts, and how many tokens they are depends on the "
                "images; its memory cannot be predicted."
            )
        (prompt,) = model.prompt_tokens(inputs, sampling=sampling)
        length = max(len(prompt), sampling.max_prompt_tokens)
        fill = torch.full((length - len(prompt),), model.pad_token)
        new = torch.full((sampling.max_new_tokens,), model.pad_token)
        batch = pad_batch([torch.cat([fill, prompt])], [new], pad_token=model.pad_token)
        with self._shapes() as self.size:
            model.hidden(batch)
        self.row = {
            "row_elements": length + len(new),
            "condition_bytes": 0,
            "head_bytes": 4 * len(new) * len(model.vocabulary),
            "cache_bytes": _cache_bytes(model.trainable, dtype=self._dtype),
            "rollout_rows": 1,
            "train_rows": 1,
            "step_rows": 1,
            "sde_steps": 0,
            "step_forwards": 1,
            # int64 tokens, and fp32 log-probs.
            "stored_bytes": 8 * (length + len(new)) + 4 * len(new),
        }

    @contextmanager
    def _shapes(self) -> Generator[ForwardSize]:
        roots = _roots(self._model.trainable, self._blocks)
        with ExitStack() as hooks:
            if self._dtype is not None:
                # As backends do in mixed precision.
                hook = functools.partial(cast_inputs, dtype=self._dtype)
                for root in roots:
                    hooks.callback(root.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield hooks.enter_context(
                shapes_only(
                    roots, blocks=self._blocks, adapted=self._adapted, unpacked=self._unpacked, dtype=self._dtype
                )
            )


def _conditions(model: Any, inputs: Inputs, *, sampling: LatentSamplingConfig) -> dict[str, Any]:
    """Conditions of one prompt; those of a pipeline are zeros, which need no encoder."""
    if not isinstance(model, PipelineModel):
        return dict(model.encode(inputs, sampling=sampling))
    encoders = [part for name, part in _parts(model) if name not in (*model.experts, "vae")]
    # Some models call the trunk of an encoder, without its head.
    trunks = [child for encoder in encoders for child in encoder.children()]
    with torch.no_grad(), shapes_only([*encoders, *trunks], dtype=model.text_dtype), model.without_encoders():
        return dict(model.encode(inputs, sampling=sampling))


def _other_parts(model: Model) -> tuple[int, int]:
    """Bytes of a pipeline's encoders and decoder; of a `PipelineModel` whether or not they are loaded."""
    trained = set(model.trainable.modules())
    sizes = dict.fromkeys(("encode", "decode"), 0)
    for name, part in _parts(model):
        if part not in trained:
            tensors = [*part.parameters(), *part.buffers()]
            size = _bytes(tensors)
            if isinstance(model, PipelineModel):
                dtype: torch.dtype = model.vae_dtype if name == "vae" else model.text_dtype
                size = _elements(tensors) * dtype.itemsize
            sizes["decode" if name == "vae" else "encode"] += size
    return sizes["encode"], sizes["decode"]


def _parts(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the pipeline of diffusers that a model runs, if it does."""
    components: dict[str, Any] = getattr(getattr(model, "pipeline", None), "components", {})
    for name, part in components.items():
        if isinstance(part, nn.Module):
            yield name, part


def _bytes_of_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """Bytes of the parameters of each block that is not within another one, without those that have other places."""
    uses = Counter(id(param) for part in module.modules() for param in part.parameters(recurse=False))
    inner = {part for block in blocks for part in block.modules() if part is not block}
    own = [[param for param in block.parameters() if uses[id(param)] == 1] for block in blocks if block not in inner]
    return [_bytes(params) for params in own]


def _roots(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that run blocks: what is above them may route rows by their values, which shapes do not have."""
    if not blocks:
        return [module]
    found: list[nn.Module] = []
    for part in module.modules():
        lists = [child for child in part.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
        children = [*part.children(), *(block for each in lists for block in each.children())]
        if not isinstance(part, nn.ModuleList | nn.ModuleDict) and any(child in blocks for child in children):
            found.append(part)
    return [part for part in found if not any(part is not other and part in other.modules() for other in found)]


def _cache_bytes(module: nn.Module, *, dtype: torch.dtype | None) -> int:
    """Keys and values of a token: 2 x layers with attention x heads of the keys x their width."""
    config = cast(Any, module).config.get_text_config()
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return 2 * layers * keys * width * (dtype or next(module.parameters()).dtype).itemsize


def _adapted(model: Model, memory: TrainingMemory) -> list[nn.Linear]:
    """Linear layers with an adapter, as backends choose them. Raises RecipeError for targets that match none."""
    if not memory.lora_rank:
        return []
    named = dict(cast("Iterable[tuple[str, nn.Module]]", model.trainable.named_modules()))
    layers = {name: part for name, part in named.items() if isinstance(part, nn.Linear)}
    targets = memory.lora_targets or names_in(model.spec.lora_targets, model.trainable, may_be_empty=True)
    may_train = {name: layer.weight.requires_grad for name, layer in layers.items()}
    kinds = {name: type(part).__name__ for name, part in named.items()}
    return [layers[name] for name in adapted_layers(targets, may_train, module=kinds[""], kinds=kinds)]


def _critic_params(model: Model) -> list[int]:
    """Elements of each parameter of a critic."""
    trunk = text_model(model).trunk if "text" in model.spec.tracks.values() else model.trainable
    return [param.numel() for param in trunk.parameters() if param.requires_grad]


def _freeze(module: nn.Module, patterns: Mapping[str, float]) -> list[Tensor]:
    """Freeze the parameters whose learning rate is scaled by 0, as backends do, and return them."""
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    scales = lr_scales_of(patterns, named, module=type(module).__name__)
    return [param.requires_grad_(False) for name, param in named.items() if scales[name] == 0]


def _quantized(blocks: Sequence[nn.Module]) -> list[nn.Linear]:
    """Layers that backends quantize."""
    parts = dict.fromkeys(part for block in blocks for part in block.modules())
    return [part for part in parts if isinstance(part, nn.Linear)]


def _saved(layer: nn.Linear, kind: str) -> int:
    """Bytes that a quantized weight takes less."""
    size = layer.weight.element_size()
    return layer.weight.numel() * size - quantized_bytes(*layer.weight.shape, kind=kind, itemsize=size)


def _leaves(value: Any) -> list[Tensor]:
    return list(cast("Sequence[Tensor]", value)) if isinstance(value, tuple | list) else [value]


def _elements(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
