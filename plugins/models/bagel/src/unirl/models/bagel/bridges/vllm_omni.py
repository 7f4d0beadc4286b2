# vLLM and vLLM-Omni are in the engine's environment alone, where type checking does not look.
# pyright: reportUnknownMemberType=false
"""BAGEL's images in vLLM-Omni, see `unirl.engines.vllm_omni.bridge.Bridge` and `SequenceBridge`.

vLLM-Omni's transformer computes every velocity, behind a cache of keys and values of what comes before the image, which
is filled once for a batch. Tokens, source images and pixels are those of `..encoder`: vLLM-Omni's VAE has the published
size alone and draws a sample of a source's posterior, and its ViT leaves out the last norm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.model_files import read_json
from unirl.model_host.tokens.causal_lm_files import load_tokenizer

from ..checkpoint import CONFIG, LANGUAGE, WEIGHTS, find, sizes_of
from ..config import BagelConfig
from ..encoder import Encoder
from ..sequence import Marks, layout
from ..vision import grid_places

if TYPE_CHECKING:
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "BagelInVllmOmni"]

_STOCK = "vllm_omni.diffusion.models.bagel.bagel_transformer"
_SHARDS: Mapping[int, tuple[Any, ...]] = {1: (None,), 2: (0, 1), 3: ("q", "k", "v")}
"""Number of parts of a fused layer -> vLLM's names for them."""
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


class BagelInVllmOmni:
    pipeline = f"{__name__}:BagelPipeline"
    architecture = "BagelPipeline"
    module = "bagel"
    fused: Mapping[str, tuple[str, ...]] = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "qkv_moe_gen": ("q_proj_moe_gen", "k_proj_moe_gen", "v_proj_moe_gen"),
        "o": ("o_proj",),
        "o_moe_gen": ("o_proj_moe_gen",),
        "gate_up_proj": ("gate_proj", "up_proj"),
        # Norms of both experts are one layer.
        **{f"{name}.gen_weight": (f"{name}_moe_gen.weight",) for name in _NORMS},
    }

    def unfit(self, model: Any) -> str:
        return ""

    def checkpoint(self, model: Any, path: str) -> Path:
        return find(BagelConfig(path=path)) if path else model.folder

    def settings(self, model: Any) -> dict[str, Any]:
        images = model.images
        return {
            "vision_dtype": str(images.vision.vit_model.vision_model.post_layernorm.weight.dtype),
            "vae_dtype": str(images.vae.dtype),
        }

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return pipeline.unirl_encoder.latent_shape(sampling)

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        return pipeline.unirl_encoder.encode(inputs, sampling)

    def prefilled(self, pipeline: Any, conditions: Mapping[str, Any]) -> dict[str, Ragged]:
        """`keys` and `values` n times [layers, P, kv heads, head], and `position` [n], that of the image."""
        names = ("tokens", "latents", "latent_places", "features", "feature_places")
        rows = [
            self._cached(pipeline, dict(zip(names, row, strict=True)))
            for row in zip(*(conditions[name] for name in names), strict=True)
        ]
        return {
            "keys": tuple(keys for keys, _, _ in rows),
            "values": tuple(values for _, values, _ in rows),
            "position": torch.tensor([position for _, _, position in rows], device=pipeline.device),
        }

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        rows, _, height, width = x.shape
        count, marks, device = height * width, pipeline.unirl_encoder.marks, x.device
        # Of each row: the mark before an image, its latents, the mark after it.
        starts = torch.arange(rows, device=device)[:, None] * (count + 2)
        places = grid_places(height, width, side=pipeline.unirl_sizes.latent_side).to(device)
        with _precision(pipeline):
            output = pipeline.bagel.forward_single_branch(
                x_t=x.flatten(2).transpose(1, 2).flatten(0, 1),
                timestep=sigma.float().repeat_interleave(count),
                packed_vae_token_indexes=(starts + 1 + torch.arange(count, device=device)).flatten(),
                packed_vae_position_ids=places.repeat(rows),
                packed_text_ids=torch.tensor([marks.image_start, marks.image_end], device=device).repeat(rows),
                packed_text_indexes=(starts + torch.tensor([0, count + 1], device=device)).flatten(),
                packed_position_ids=conditions["position"].to(device).repeat_interleave(count + 2),
                packed_seqlens=torch.full((rows,), count + 2, device=device),
                past_key_values=_cache(conditions["keys"], conditions["values"]),
            )
        return output.float().view(rows, count, -1).transpose(1, 2).reshape(x.shape).contiguous()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        return pipeline.unirl_encoder.decode(latents)

    @torch.no_grad()
    def _cached(self, pipeline: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        """Keys and values of a sequence [layers, P, kv heads, head], and the position after it."""
        bagel, marks, tokens = pipeline.bagel, pipeline.unirl_encoder.marks, row["tokens"].to(pipeline.device)
        cache, position = _empty_cache(pipeline.unirl_sizes.layers), 0
        latents, features = (
            _Reader(row["latents"], row["latent_places"]),
            _Reader(row["features"], row["feature_places"]),
        )
        for own, positions, is_image in _pieces(tokens, marks):
            position = int(positions[-1]) + 1
            arguments: dict[str, Any] = {"is_causal": not is_image, "mode": "und"}
            with _precision(pipeline):
                states = bagel.language_model.model.embed_tokens(own.masked_fill(own >= marks.latent, 0))
                if is_image and own[1] == marks.latent:
                    values, places = latents.next(len(own) - 2)
                    times = bagel.time_embedder(torch.zeros(1, device=own.device))
                    shown = bagel.vae2llm(values.to(states.dtype)) + times + bagel.latent_pos_embed(places)
                    index = torch.arange(len(own), device=own.device)
                    arguments |= {
                        "mode": "gen",
                        "packed_vae_token_indexes": index[1:-1],
                        "packed_text_indexes": index[[0, -1]],
                    }
                    states[1:-1] = shown.to(states.dtype)
                elif is_image:
                    values, places = features.next(len(own) - 2)
                    shown = bagel.connector(values.to(states.dtype)) + bagel.vit_pos_embed(places)
                    states[1:-1] = shown.to(states.dtype)
                cache = bagel.language_model(
                    packed_query_sequence=states,
                    query_lens=torch.tensor([len(own)], dtype=torch.int, device=own.device),
                    packed_query_position_ids=positions,
                    past_key_values=cache,
                    update_past_key_values=True,
                    **arguments,
                ).past_key_values
        if not len(tokens):
            attention = bagel.language_model.model.layers[0].self_attn
            shape = (pipeline.unirl_sizes.layers, 0, attention.num_kv_heads, attention.head_dim)
            nothing = torch.zeros(shape, device=pipeline.device)
            return nothing, nothing, 0
        keys, values = (
            torch.stack([kept[layer] for layer in range(len(kept))]) for kept in (cache.key_cache, cache.value_cache)
        )
        return keys, values, position


class _Reader:
    """Hands out what source images show, in their order."""

    def __init__(self, values: Tensor, places: Tensor) -> None:
        self._rest = (values, places)

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        values, places = self._rest
        self._rest = values[count:], places[count:]
        return values[:count], places[:count]


def _pieces(tokens: Tensor, marks: Marks) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Tokens and positions of each text and each image of a sequence [P], and whether it is one."""
    if not len(tokens):
        return
    positions, numbers = layout(tokens[None], torch.ones_like(tokens, dtype=torch.bool)[None], marks=marks)
    _, counts = numbers[0].unique_consecutive(return_counts=True)
    sizes: list[int] = counts.tolist()
    parts = (each.split(sizes) for each in (tokens, positions[0], numbers[0]))
    for own, places, number in zip(*parts, strict=True):
        yield own, places, bool(number[0])


def _empty_cache(layers: int) -> Any:
    return import_module(_STOCK).NaiveCache(layers)


def _cache(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """vLLM-Omni's cache of rows one after the other, each of its own length."""
    lengths = [row.shape[1] for row in keys]
    result = _empty_cache(keys[0].shape[0])
    result.key_values_lens = lengths
    if any(lengths):
        for layer in range(result.num_layers):
            result.key_cache[layer] = torch.cat([row[layer] for row in keys])
            result.value_cache[layer] = torch.cat([row[layer] for row in values])
    return result


def _precision(pipeline: Any) -> Any:
    """As in vLLM-Omni's pipeline, which embeds timesteps in fp32 beside weights in 16 bits."""
    dtype = pipeline.od_config.dtype
    return torch.autocast(pipeline.device.type, dtype=dtype, enabled=dtype != torch.float32)


BRIDGE = BagelInVllmOmni()


def __getattr__(name: str) -> Any:
    """`BagelPipeline`, which is made of vLLM-Omni's modules, defined in its environment."""
    if name != "BagelPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline()


@functools.cache
def _pipeline() -> type:
    stock, layers = import_module(_STOCK), import_module("vllm.model_executor.layers.linear")
    device_of = import_module("vllm_omni.diffusion.distributed.utils").get_local_device
    settings_of = import_module("vllm.transformers_utils.configs.bagel").BagelConfig

    class BagelPipeline(nn.Module):
        _lora_components = ("bagel",)
        stacked_params_mapping = tuple(
            (f".{end}", f".{part}")
            for end, parts in BRIDGE.fused.items()
            if len(parts) > 1
            for part in parts
        )  # fmt: skip
        """Read by vLLM-Omni where it looks for the parts of an adapter."""
        unirl_settings: Mapping[str, Any]
        unirl_folder: str

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            super().__init__()
            _check(od_config)
            self.od_config, self.device = od_config, device_of()
            folder = Path(self.unirl_folder)
            self.unirl_sizes = sizes = sizes_of(folder)
            self._files = weight_files(folder, WEIGHTS)
            self.unirl_encoder = _encoder(folder, self._files, self.unirl_settings, device=self.device)
            # Its casts to bf16, whatever the engine's dtype.
            stock.torch = _TorchIn(od_config.dtype)
            config = stock.Qwen2MoTConfig(**{**read_json(folder / LANGUAGE), "tie_word_embeddings": False})
            language = stock.Qwen2MoTForCausalLM(config)
            # vLLM's has more rows than the checkpoint.
            language.model.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
            for number, layer in enumerate(language.model.layers):
                _route(layer.self_attn, layers, prefix=f"bagel.layers.{number}.self_attn", sizes=sizes)
            given = read_json(folder / CONFIG)
            self.bagel = stock.Bagel(
                language_model=language,
                vit_model=None,
                config=settings_of(
                    llm_config=config,
                    vae_config=SimpleNamespace(**given["vae_config"]),
                    vit_config=SimpleNamespace(patch_size=1, hidden_size=sizes.vision),
                    vit_max_num_patch_per_side=sizes.vision_side,
                    latent_patch_size=given.get("latent_patch_size", 2),
                    max_latent_size=sizes.latent_side,
                    connector_act=sizes.connector_act,
                ),
            ).eval()

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            """Load the checkpoint's files; vLLM-Omni is given none. Returns the names of all parameters."""
            held = dict(self.bagel.named_parameters())
            result: set[str] = set()
            for name, value in _stored(self._files):
                own, shard = _held_as(name)
                if own not in held:
                    continue
                load = getattr(held[own], "weight_loader", None)
                if load is None:
                    held[own].data.copy_(value)
                else:
                    load(held[own], value, *(() if shard is None else (shard,)))
                result.add(f"bagel.{own}")
            return result

    return BagelPipeline


def _check(od_config: Any) -> None:
    """Raise RuntimeError for what the bridge was not tested with."""
    release = version("vllm-omni")
    if release.startswith("0.30."):
        raise RuntimeError(f"vLLM-Omni {release}: BAGEL runs in 0.32. Leave engine.release empty.")
    ranks = od_config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise RuntimeError(
            f"engine.tensor_parallel: got {ranks}, expected 1 for BAGEL, whose weights are not split over ranks."
        )


def _encoder(folder: Path, files: Sequence[Path], settings: Mapping[str, Any], *, device: Any) -> Encoder:
    # vLLM-Omni makes pipelines with the engine's dtype as torch's default.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        vision, vae = (getattr(torch, settings[name].removeprefix("torch.")) for name in ("vision_dtype", "vae_dtype"))
        return Encoder(
            folder,
            files=files,
            sizes=sizes_of(folder),
            tokenizer=load_tokenizer(folder),
            batch=0,
            dtypes=(vision, vae),
            device=device,
        )
    finally:
        torch.set_default_dtype(before)


class _TorchIn(ModuleType):
    """torch, with the engine's dtype for bf16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("torch")
        self.bfloat16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Routed(nn.Module):
    """The projection of both experts, in place of vLLM-Omni's. Its layers are the attention's own, `name` and
    `name_moe_gen`, where vLLM-Omni finds them to put adapters around them."""

    def __init__(self, attention: nn.Module, name: str) -> None:
        super().__init__()
        # Not a child: the attention holds this module.
        self._owner, self._name = (attention,), name

    def forward(self, x: Tensor, text: Tensor | None = None, latents: Tensor | None = None) -> tuple[Tensor, None]:
        if text is None or latents is None:
            return self._projected(x, ""), None
        first, second = self._projected(x[text], ""), self._projected(x[latents], "_moe_gen")
        result = first.new_empty(len(x), first.shape[-1])
        result[text], result[latents] = first, second
        return result, None

    def _projected(self, x: Tensor, expert: str) -> Tensor:
        return getattr(self._owner[0], self._name + expert)(x)[0]


def _route(attention: Any, layers: Any, *, prefix: str, sizes: Any) -> None:
    head = sizes.width // sizes.heads
    for expert in ("", "_moe_gen"):
        qkv = layers.QKVParallelLinear(
            sizes.width, head, sizes.heads, sizes.kv_heads, bias=True, prefix=f"{prefix}.qkv{expert}"
        )
        output = layers.RowParallelLinear(sizes.width, sizes.width, bias=False, prefix=f"{prefix}.o{expert}")
        attention.add_module(f"qkv{expert}", qkv)
        attention.add_module(f"o{expert}", output)
    attention.qkv_proj, attention.o_proj = _Routed(attention, "qkv"), _Routed(attention, "o")


def _held_as(name: str) -> tuple[str, Any]:
    """A stored tensor's parameter in vLLM-Omni's module, and which part of it."""
    full = f".{name}."
    for end, parts in BRIDGE.fused.items():
        for part, shard in zip(parts, _SHARDS[len(parts)], strict=True):
            if f".{part}." in full:
                return full.replace(f".{part}.", f".{end}.").strip("."), shard
    return name, None


def _stored(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    opened: Any
    for file in files:
        with import_module("safetensors").safe_open(file, framework="pt") as opened:
            for name in set(opened.keys()):
                yield name, opened.get_tensor(name)
