# vLLM is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false
"""vLLM-Omni's transformer of HunyuanImage-3.0 as a text track, and keys and values of what comes before an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.model_host.unified.engine_texts import Prefix, TextRules, UnifiedDecoder
from unirl.model_host.unified.layers import sight

from ..module import angles
from ..sequence import layout

__all__ = ["HunyuanDecoder", "caches_of", "dtype_of", "through_layers"]


class HunyuanDecoder(UnifiedDecoder):
    spec = TextRules("hunyuan-image3", restricts=frozenset({"text"}))

    def __init__(self, pipeline: Any) -> None:
        transformer = pipeline.transformer
        decoder = transformer.model
        super().__init__(pipeline, trainable=transformer, decoder=decoder, norm=decoder.ln_f, head=transformer.lm_head)
        self._pipeline = pipeline

    def embedded(self, tokens: Tensor) -> Tensor:
        return self._decoder.wte(tokens)

    def rotary(self, states: Tensor, positions: Tensor) -> Any:
        return _rotary(self._pipeline, positions[:, None].repeat(1, 2))

    def turned(self, attention: Any, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        turned = attention.image_rope2d_emb(q.flatten(1), k.flatten(1), q, rotary)
        q, k = (one.unflatten(1, (-1, attention.head_dim)) for one in turned)
        return attention.query_layernorm(q.contiguous()), attention.key_layernorm(k.contiguous())

    def computing(self) -> Any:
        return _experts(self._pipeline)

    def filled(self, row: Mapping[str, Tensor]) -> Prefix:
        """All of it in one forward."""
        pipeline = self._pipeline
        transformer, encoder = pipeline.transformer, pipeline.unirl_encoder
        dtype, stand, tokens = dtype_of(transformer), encoder.stand, row["tokens"].to(pipeline.device)
        keep = torch.ones_like(tokens, dtype=torch.bool)[None]
        positions, blocks = layout(tokens[None], keep, marks=encoder.marks, stand=stand)
        states = transformer.model.wte(tokens.masked_fill(tokens >= stand.vocab, 0))
        places = positions[0, :, None].repeat(1, 2)
        latents, (moved,) = encoder.sources({name: (value,) for name, value in row.items()})
        if latents:
            zero = torch.zeros(1, device=tokens.device)
            sources = [
                transformer.patch_embed(one[None].to(dtype), transformer.time_embed(zero))[0][0] for one in latents
            ]
            states[tokens == stand.latent] = torch.cat(sources)
            states[tokens == stand.feature] = transformer.vision_aligner(row["features"].to(dtype))
            states[tokens == stand.clean_time] = transformer.timestep_emb(zero)
            places[(tokens == stand.latent) | (tokens == stand.feature)] += torch.cat(moved).to(tokens.device)
        output = through_layers(pipeline, states[None], mask=sight(keep, blocks)[:, None], places=places[None])
        caches = caches_of(transformer)
        keys, values = zip(*(cache.image_kv_cache_map for cache in caches), strict=True)
        for cache in caches:
            cache.clear_legacy_prompt_kv_cache()
        return Prefix(torch.cat(keys), torch.cat(values), len(tokens), self._norm(output[0, -1:])[0])


def through_layers(pipeline: Any, states: Tensor, *, mask: Tensor, places: Tensor, behind: int | None = None) -> Tensor:
    """States [B, L, D] after the last layer, without the last norm. mask: [B, 1, L, cached + L].  places: rows and
    columns [B, L, 2].  behind: positions of the cache; None fills it with all that is given."""
    rows, count = states.shape[:2]
    with _experts(pipeline):
        return pipeline.transformer.model(
            inputs_embeds=states,
            attention_mask=mask,
            custom_pos_emb=_rotary(pipeline, places.flatten(0, 1)),
            mode="gen_image",
            first_step=behind is None,
            query_lens=[count] * rows,
            seq_lens=[mask.shape[3]] * rows,
            num_image_tokens=count,
            gen_timestep_scatter_index=torch.full((rows, 1), count, device=states.device) if behind is None else None,
            use_cache=False,
            return_dict=True,
        ).last_hidden_state


def caches_of(transformer: Any) -> list[Any]:
    """vLLM-Omni's caches of keys and values, of each layer."""
    return [layer.self_attn.image_attn for layer in transformer.model.layers]


def dtype_of(transformer: Any) -> torch.dtype:
    return transformer.model.wte.weight.dtype


def _rotary(pipeline: Any, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, head / 2] of rows and columns [N, 2]."""
    sizes = pipeline.unirl_sizes
    angle = angles(places, head=sizes.head, theta=sizes.rope_theta)
    return angle.cos(), angle.sin()


def _experts(pipeline: Any) -> Any:
    from vllm.forward_context import set_forward_context

    # Experts are looked up in the config that they were made with.
    return set_forward_context(None, pipeline.vllm_config)
