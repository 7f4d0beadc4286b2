# vLLM-Omni is in the engine's environment alone, where type checking does not look.
"""vLLM-Omni's transformer of BAGEL as a text track, and keys and values of what comes before an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from unirl.model_host.unified.engine_texts import Prefix, TextRules, UnifiedDecoder

from ..sequence import Marks, layout

__all__ = ["BagelDecoder", "naive_cache", "precision"]


class BagelDecoder(UnifiedDecoder):
    spec = TextRules("bagel")

    def __init__(self, pipeline: Any) -> None:
        language = pipeline.bagel.language_model
        super().__init__(
            pipeline,
            trainable=pipeline.bagel,
            decoder=language.model,
            norm=language.model.norm,
            head=language.lm_head,
        )
        self._pipeline = pipeline

    def embedded(self, tokens: Tensor) -> Tensor:
        return self._decoder.embed_tokens(tokens)

    def rotary(self, states: Tensor, positions: Tensor) -> Any:
        return [angles[0] for angles in self._decoder.rotary_emb(states, positions[None])]

    def turned(self, attention: Any, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        cos, sin = (angles[:, : attention.head_dim // 2] for angles in rotary)
        q, k = (
            attention.rotary_op(norm(one.float()).to(cos.dtype)[None], cos, sin)[0]
            for norm, one in ((attention.q_norm, q), (attention.k_norm, k))
        )
        return q, k

    def computing(self) -> Any:
        return precision(self._pipeline)

    def filled(self, row: Mapping[str, Tensor]) -> Prefix:
        """A text or an image at a time."""
        pipeline = self._pipeline
        bagel, marks, tokens = pipeline.bagel, pipeline.unirl_encoder.marks, row["tokens"].to(pipeline.device)
        if not len(tokens):
            attention = bagel.language_model.model.layers[0].self_attn
            shape = (pipeline.unirl_sizes.layers, 0, attention.num_kv_heads, attention.head_dim)
            nothing = torch.zeros(shape, device=pipeline.device)
            return Prefix(nothing, nothing, 0, torch.zeros(pipeline.unirl_sizes.width, device=pipeline.device))
        cache, position, states = naive_cache(pipeline.unirl_sizes.layers), 0, tokens
        latents, features = _shown(row["latents"], row["latent_places"]), _shown(row["features"], row["feature_places"])
        with precision(pipeline):
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
                output = bagel.language_model(
                    packed_query_sequence=states,
                    query_lens=torch.tensor([len(own)], dtype=torch.int, device=own.device),
                    packed_query_position_ids=positions,
                    past_key_values=cache,
                    update_past_key_values=True,
                    **arguments,
                )
                cache, states = output.past_key_values, output.packed_query_sequence
        keys, values = (
            torch.stack([kept[layer] for layer in range(len(kept))]) for kept in (cache.key_cache, cache.value_cache)
        )
        return Prefix(keys, values, position, states[-1])


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


def naive_cache(layers: int) -> Any:
    """vLLM-Omni's cache, empty."""
    return import_module("vllm_omni.diffusion.models.bagel.bagel_transformer").NaiveCache(layers)


def precision(pipeline: Any) -> Any:
    """As in vLLM-Omni's pipeline, which embeds timesteps in fp32 beside weights in 16 bits."""
    dtype = pipeline.od_config.dtype
    return torch.autocast(pipeline.device.type, dtype=dtype, enabled=dtype != torch.float32)
