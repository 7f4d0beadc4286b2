"""Texts of a unified model in an engine: logits of the engine's transformer for UniRL's token loop.

Runs in the engine's environment. Engines know one sequence at a time: prompts go through the engine's forward one by
one, and further tokens of all rows together through its layers, with attention over the keys and values of each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.numerics.tokens.log_probs import output_logits

from .encoder import SequenceEncoder

__all__ = ["Prefix", "TextRules", "UnifiedDecoder"]


class Prefix(NamedTuple):
    """What a sequence [P] leaves behind, for a text or an image that continues it."""

    keys: Tensor
    """[layers, P, kv heads, head]"""
    values: Tensor
    position: int
    """That of the next token."""
    state: Tensor
    """[D], the last state, after the last norm."""


class TextRules(NamedTuple):
    """The part of a model's spec that the token loop reads."""

    name: str
    restricts: frozenset[str] = frozenset()


class _Cache(NamedTuple):
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values [B, kv heads, cached, head], padded on the left."""
    positions: Tensor
    """[B] int64, those of the next tokens."""


class UnifiedDecoder(ABC):
    """A `unirl.numerics.tokens.rollout.TokenDecoder` over a pipeline that holds the model's encoder as
    `unirl_encoder`."""

    spec: TextRules
    pad_token = 0
    """Never read: prompts go through one by one."""

    def __init__(self, pipeline: Any, *, trainable: Any, decoder: Any, norm: Any, head: Any) -> None:
        """trainable: the module of all trained weights.  decoder: its part with the `layers`.  norm: the last one.
        head: the output projection."""
        self.trainable, self.device = trainable, pipeline.device
        self._decoder, self._norm, self._head = decoder, norm, head
        self._encoder: SequenceEncoder[Any] = pipeline.unirl_encoder

    @abstractmethod
    def filled(self, row: Mapping[str, Tensor]) -> Prefix:
        """A sequence through the engine's transformer. row: its conditions, as of `SequenceEncoder.encode`."""

    @abstractmethod
    def embedded(self, tokens: Tensor) -> Tensor:
        """States [B, D] of tokens [B] of the vocabulary."""

    @abstractmethod
    def rotary(self, states: Tensor, positions: Tensor) -> Any:
        """What `turned` takes for tokens at these positions [B], one of each row."""

    @abstractmethod
    def turned(self, attention: Any, q: Tensor, k: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """Queries [B, heads, head] and keys [B, kv heads, head], normed and rotated."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[Any]:
        """What the engine computes within, such as its autocast."""

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return self._encoder.texts(tokens)

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        return self._encoder.allowed(tokens, options=options)

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: Any,
        conditions: Mapping[str, Ragged] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """See `TextModel.next_logits`. Without conditions the tokens are text alone. positions: not used, for those of
        tokens behind an image depend on it.  options: restrict tokens, and change no logits."""
        if cache is None:
            given = conditions or self._encoder.images.encoded([()] * len(tokens))
            states, cache = self._prompts(tokens, attention_mask, given)
        else:
            with self.computing():
                states, cache = self._further(tokens[:, 0], attention_mask, cache)
        return output_logits(states, self._head.weight), cache

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        rows = rows.to(self.device)
        return _Cache([(keys[rows], values[rows]) for keys, values in cache.layers], cache.positions[rows])

    def _prompts(self, tokens: Tensor, keep: Tensor, conditions: Mapping[str, Ragged]) -> tuple[Tensor, _Cache]:
        """Last states [B, D] of prompts [B, P], and the cache."""
        rows = [
            self.filled({"tokens": own[is_token], **dict(zip(conditions, images, strict=True))})
            for own, is_token, *images in zip(tokens, keep, *conditions.values(), strict=True)
        ]
        longest = tokens.shape[1]

        def padded(values: Tensor) -> Tensor:
            return F.pad(values, (0, 0, 0, 0, longest - values.shape[1], 0)).transpose(1, 2)

        keys = torch.stack([padded(row.keys) for row in rows], dim=1)
        values = torch.stack([padded(row.values) for row in rows], dim=1)
        positions = torch.tensor([row.position for row in rows], device=self.device)
        return torch.stack([row.state for row in rows]), _Cache([*zip(keys, values, strict=True)], positions)

    def _further(self, tokens: Tensor, keep: Tensor, cache: _Cache) -> tuple[Tensor, _Cache]:
        """States [B, D] of the next tokens [B], as the engine's layers compute them for one sequence.

        keep: [B, cached + 1] bool."""
        states = self.embedded(tokens)
        rotary, mask = self.rotary(states, cache.positions), keep[:, None, None]
        layers: list[tuple[Tensor, Tensor]] = []
        for layer, past in zip(self._decoder.layers, cache.layers, strict=True):
            result, kept = self._attended(layer.self_attn, layer.input_layernorm(states), rotary, mask, past)
            states = states + result
            states = states + layer.mlp(layer.post_attention_layernorm(states))
            layers.append(kept)
        return self._norm(states), _Cache(layers, cache.positions + 1)

    def _attended(
        self, attention: Any, states: Tensor, rotary: Any, mask: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output [B, D] of an attention for one token [B, D] of each row, and its keys and values behind those of
        `past`.

        mask: [B, 1, 1, cached + 1].
        """
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        parts = attention.qkv_proj(states)[0].split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
        q, k = self.turned(attention, q, k, rotary)
        q, k, v = (one.to(past[0].dtype)[:, :, None] for one in (q, k, v))
        keys, values = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        scale = attention.head_dim**-0.5
        result = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return attention.o_proj(result.flatten(1))[0], (keys, values)
