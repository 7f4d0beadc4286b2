# vLLM-Omni is in the engine's environment alone, where type checking does not look.
"""BAGEL's images in vLLM-Omni, see `unirl.engines.vllm_omni.bridge.Bridge` and `SequenceBridge`.

vLLM-Omni's transformer computes every velocity, behind the keys and values of what comes before the image, which are
computed once for a batch. Tokens, source images and pixels are those of `..encoder`: vLLM-Omni's VAE has the published
size alone and draws a sample of a source's posterior, and its ViT leaves out the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..sequence import Marks, layout
from ..vision import grid_places
from .fused_layers import FUSED

if TYPE_CHECKING:
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "BagelInVllmOmni"]

_CONDITIONS = ("tokens", "latents", "latent_places", "features", "feature_places")


class BagelInVllmOmni:
    pipeline = f"{__name__}:BagelPipeline"
    architecture = "BagelPipeline"
    module = "bagel"
    fused = FUSED

    def unfit(self, model: Any) -> str:
        return ""

    def checkpoint(self, model: Any, path: str) -> Path:
        from ..checkpoint import find

        return find(path) if path else model.folder

    def settings(self, model: Any) -> dict[str, Any]:
        dtypes = {
            "vision_dtype": model.images.vision.vit_model.vision_model.post_layernorm.weight.dtype,
            "vae_dtype": model.images.vae.dtype,
        }
        return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return pipeline.unirl_encoder.latent_shape(sampling)

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        return pipeline.unirl_encoder.encode(inputs, sampling)

    @torch.no_grad()
    def prefilled(self, pipeline: Any, conditions: Mapping[str, Any]) -> dict[str, Ragged]:
        """`keys` and `values` n times [layers, P, kv heads, head], and `position` [n], that of the image."""
        rows = [
            _before_image(pipeline, dict(zip(_CONDITIONS, row, strict=True)))
            for row in zip(*(conditions[name] for name in _CONDITIONS), strict=True)
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
                past_key_values=_joined(conditions["keys"], conditions["values"]),
            )
        return output.float().view(rows, count, -1).transpose(1, 2).reshape(x.shape).contiguous()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        return pipeline.unirl_encoder.decode(latents)


BRIDGE = BagelInVllmOmni()


def __getattr__(name: str) -> Any:
    """`BagelPipeline`, which imports vLLM-Omni."""
    if name != "BagelPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_omni_pipeline import BagelPipeline

    return BagelPipeline


def _before_image(pipeline: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Keys and values of a sequence, and the position after it. row: its conditions."""
    bagel, marks, tokens = pipeline.bagel, pipeline.unirl_encoder.marks, row["tokens"].to(pipeline.device)
    if not len(tokens):
        attention = bagel.language_model.model.layers[0].self_attn
        shape = (pipeline.unirl_sizes.layers, 0, attention.num_kv_heads, attention.head_dim)
        nothing = torch.zeros(shape, device=pipeline.device)
        return nothing, nothing, 0
    cache, position = _cache(pipeline.unirl_sizes.layers), 0
    latents, features = _shown(row["latents"], row["latent_places"]), _shown(row["features"], row["feature_places"])
    with _precision(pipeline):
        for own, positions, is_image in _pieces(tokens, marks):
            position = int(positions[-1]) + 1
            arguments: dict[str, Any] = {"is_causal": not is_image, "mode": "und"}
            states = bagel.language_model.model.embed_tokens(own.masked_fill(own >= marks.latent, 0))
            if is_image and own[1] == marks.latent:
                values, places = latents(len(own) - 2)
                times = bagel.time_embedder(torch.zeros(1, device=own.device))
                inside = bagel.vae2llm(values.to(states.dtype)) + times + bagel.latent_pos_embed(places)
                index = torch.arange(len(own), device=own.device)
                experts = {"packed_vae_token_indexes": index[1:-1], "packed_text_indexes": index[[0, -1]]}
                arguments |= {"mode": "gen", **experts}
                states[1:-1] = inside.to(states.dtype)
            elif is_image:
                values, places = features(len(own) - 2)
                inside = bagel.connector(values.to(states.dtype)) + bagel.vit_pos_embed(places)
                states[1:-1] = inside.to(states.dtype)
            cache = bagel.language_model(
                packed_query_sequence=states,
                query_lens=torch.tensor([len(own)], dtype=torch.int, device=own.device),
                packed_query_position_ids=positions,
                past_key_values=cache,
                update_past_key_values=True,
                **arguments,
            ).past_key_values
    keys, values = (
        torch.stack([kept[layer] for layer in range(len(kept))]) for kept in (cache.key_cache, cache.value_cache)
    )
    return keys, values, position


def _shown(values: Tensor, places: Tensor) -> Any:
    """Hands out what source images show, in their order: takes a count."""
    rest = [(values, places)]

    def following(count: int) -> tuple[Tensor, Tensor]:
        values, places = rest[0]
        rest[0] = values[count:], places[count:]
        return values[:count], places[:count]

    return following


def _pieces(tokens: Tensor, marks: Marks) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Tokens and positions of each text and each image of a sequence [P], and whether it is an image."""
    positions, numbers = layout(tokens[None], torch.ones_like(tokens, dtype=torch.bool)[None], marks=marks)
    counts: Any = numbers[0].unique_consecutive(return_counts=True)[1]
    sizes: list[int] = counts.tolist()
    parts = (each.split(sizes) for each in (tokens, positions[0], numbers[0]))
    for own, places, number in zip(*parts, strict=True):
        yield own, places, bool(number[0])


def _joined(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """vLLM-Omni's cache of rows one after the other, each of its own length."""
    lengths = [row.shape[1] for row in keys]
    result = _cache(keys[0].shape[0])
    result.key_values_lens = lengths
    if any(lengths):
        for layer in range(keys[0].shape[0]):
            result.key_cache[layer] = torch.cat([row[layer] for row in keys])
            result.value_cache[layer] = torch.cat([row[layer] for row in values])
    return result


def _cache(layers: int) -> Any:
    return import_module("vllm_omni.diffusion.models.bagel.bagel_transformer").NaiveCache(layers)


def _precision(pipeline: Any) -> Any:
    """As in vLLM-Omni's pipeline, which embeds timesteps in fp32 beside weights in 16 bits."""
    dtype = pipeline.od_config.dtype
    return torch.autocast(pipeline.device.type, dtype=dtype, enabled=dtype != torch.float32)
