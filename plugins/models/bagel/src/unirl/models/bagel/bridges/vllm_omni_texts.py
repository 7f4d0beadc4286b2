# vLLM-Omni is in the engine's environment alone, where type checking does not look.
"""BAGEL's texts in vLLM-Omni: logits of its transformer for `unirl.numerics.tokens.rollout.generate_text`.

vLLM-Omni's forward of a text takes one sequence. Prompts go through it one by one, and further tokens of all rows
together through its layers, with attention over the keys and values of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.model_host.unified.sequence import decoded
from unirl.numerics.tokens.log_probs import output_logits

from .prefix import CONDITIONS, filled, precision

__all__ = ["BagelDecoder"]


class _Cache(NamedTuple):
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values [B, kv heads, cached, head], padded on the left."""
    positions: Tensor
    """[B] int64, those of the next tokens."""


class BagelDecoder:
    """A `unirl.numerics.tokens.rollout.TokenDecoder` over vLLM-Omni's pipeline."""

    spec = SimpleNamespace(name="bagel", restricts=frozenset[str]())

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.trainable, self.device = pipeline.bagel, pipeline.device
        self.pad_token: int = pipeline.unirl_encoder.marks.end

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return decoded(self._pipeline.unirl_encoder.tokenizer, tokens)

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        return {}

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: Any,
        conditions: Mapping[str, Ragged] | None = None,
    ) -> tuple[Tensor, Any]:
        """See `TextModel.next_logits`. positions: not used, for an image counts as one."""
        if cache is None:
            assert conditions is not None, "prompts come with the conditions of their inputs"
            states, cache = self._prompts(tokens, attention_mask, conditions)
        else:
            with precision(self._pipeline):
                states, cache = self._further(tokens[:, 0], attention_mask, cache)
        return output_logits(states, self._pipeline.bagel.language_model.lm_head.weight), cache

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        rows = rows.to(self.device)
        return _Cache([(keys[rows], values[rows]) for keys, values in cache.layers], cache.positions[rows])

    def _prompts(self, tokens: Tensor, keep: Tensor, conditions: Mapping[str, Ragged]) -> tuple[Tensor, _Cache]:
        """Last states [B, D] of prompts [B, P], and the cache. Each has a forward of its own."""
        rows = [
            filled(self._pipeline, dict(zip(CONDITIONS, (own[is_token], *images), strict=True)))
            for own, is_token, *images in zip(tokens, keep, *(conditions[name] for name in CONDITIONS[1:]), strict=True)
        ]
        longest = tokens.shape[1]

        def padded(values: Tensor) -> Tensor:
            return F.pad(values, (0, 0, 0, 0, longest - values.shape[1], 0)).transpose(1, 2)

        keys = torch.stack([padded(row.keys) for row in rows], dim=1)
        values = torch.stack([padded(row.values) for row in rows], dim=1)
        positions = torch.tensor([row.position for row in rows], device=self.device)
        return torch.stack([row.state for row in rows]), _Cache([*zip(keys, values, strict=True)], positions)

    def _further(self, tokens: Tensor, keep: Tensor, cache: _Cache) -> tuple[Tensor, _Cache]:
        """States [B, D] of the next tokens [B], as vLLM-Omni's layers compute them for one sequence. keep: [B, cached +
        1] bool."""
        language = self._pipeline.bagel.language_model.model
        states = language.embed_tokens(tokens)
        rotary = [angles[0] for angles in language.rotary_emb(states, cache.positions[None])]
        mask, layers = keep[:, None, None], list[tuple[Tensor, Tensor]]()
        for layer, past in zip(language.layers, cache.layers, strict=True):
            result, kept = _attended(layer.self_attn, layer.input_layernorm(states), rotary, mask, past)
            states = states + result
            states = states + layer.mlp(layer.post_attention_layernorm(states))
            layers.append(kept)
        return language.norm(states), _Cache(layers, cache.positions + 1)


def _attended(
    attention: Any, states: Tensor, rotary: Sequence[Tensor], mask: Tensor, past: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Output [B, D] of an attention for one token [B, D] of each row, and its keys and values behind those of `past`.

    rotary: cosines and sines [B, head].  mask: [B, 1, 1, cached + 1].
    """
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    q, k, v = (part.unflatten(-1, (-1, attention.head_dim)) for part in attention.qkv_proj(states)[0].split(sizes, -1))
    cos, sin = (angles[:, : attention.head_dim // 2] for angles in rotary)
    q, k = (
        attention.rotary_op(norm(one.float()).to(cos.dtype)[None], cos, sin)[0]
        for norm, one in ((attention.q_norm, q), (attention.k_norm, k))
    )
    q, k, v = (one.to(past[0].dtype)[:, :, None] for one in (q, k, v))
    keys, values = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    result = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=attention.head_dim**-0.5, enable_gqa=True
    )
    return attention.o_proj(result.flatten(1))[0], (keys, values)
