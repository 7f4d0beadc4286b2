"""BAGEL's transformer in the names of its published checkpoint: a Qwen2 with two experts in every layer.

Tokens of text, marks of images and ViT features go through the understanding expert, VAE latents through the
generation expert (`_moe_gen`); attention sees both. Source: BAGEL, arXiv 2505.14683.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unirl.model_host.unified.layers import (
    FREQUENCIES,
    Kept,
    KeptLayers,
    Mode,
    PublishedModule,
    RmsNorm,
    attended,
    rotated,
    sight,
    waves,
)

from .checkpoint import Sizes

__all__ = ["Bagel", "MixtureLayer"]

_EXPERTS = ("", "_moe_gen")
_GATES = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
Parts: TypeAlias = tuple[Tensor, ...]
"""Tokens of each expert [N_e, ...]; of the first alone where the other has none."""


@dataclass(frozen=True)
class _Places:
    """Where the tokens of each expert lie in the rows of a batch."""

    rows: int
    flat: Parts
    """[N_e] int64 of each expert; none where the first has all."""

    def whole(self, parts: Parts) -> Tensor:
        """[B, L, ...] of all tokens."""
        if not self.flat:
            return parts[0].unflatten(0, (self.rows, -1))
        count = sum(map(len, parts))
        result = parts[0].new_zeros(count, *parts[0].shape[1:])
        for place, part in zip(self.flat, parts, strict=True):
            result = result.index_copy(0, place, part)
        return result.unflatten(0, (self.rows, -1))

    def parts(self, whole: Tensor) -> Parts:
        """Tokens of each expert of [B, L, ...]."""
        flat = whole.flatten(0, 1)
        return tuple(flat.index_select(0, place) for place in self.flat) or (flat,)


class _Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        narrow = self.head * sizes.kv_heads
        for expert in _EXPERTS:
            for name, width in (("q", sizes.width), ("k", narrow), ("v", narrow)):
                self.add_module(f"{name}_proj{expert}", nn.Linear(sizes.width, width))
            self.add_module(f"o_proj{expert}", nn.Linear(sizes.width, sizes.width, bias=False))
            for name in "qk":
                self.add_module(f"{name}_norm{expert}", RmsNorm(self.head, sizes.eps))

    def forward(
        self, parts: Parts, places: _Places, rotary: Kept, mask: Tensor | None, past: Kept | None
    ) -> tuple[Parts, Kept]:
        each = [self._projected(part, expert) for part, expert in zip(parts, _EXPERTS, strict=False)]
        q, k, v = (places.whole(kind).transpose(1, 2) for kind in zip(*each, strict=True))
        q, k = (rotated(one, rotary).to(v.dtype) for one in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        states = places.parts(attended(q, k, v, mask))
        return _each(self, "o_proj", states), (k, v)

    def _projected(self, part: Tensor, expert: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, heads, head]; the first two normalised and in fp32, as they are rotated."""
        q, k, v = (self.get_submodule(f"{name}_proj{expert}")(part).unflatten(-1, (-1, self.head)) for name in "qkv")
        q, k = (self.get_submodule(f"{name}_norm{expert}")(one.float()) for name, one in (("q", q), ("k", k)))
        return q, k, v


class MixtureLayer(nn.Module):
    """A layer with both experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        for expert in _EXPERTS:
            self.add_module(f"mlp{expert}", _Mlp(sizes))
            self.add_module(f"input_layernorm{expert}", RmsNorm(sizes.width, sizes.eps))
            self.add_module(f"post_attention_layernorm{expert}", RmsNorm(sizes.width, sizes.eps))

    def forward(
        self,
        parts: Parts,
        places: _Places,
        rotary: Kept,
        mask: Tensor | None,
        past_key_values: Kept | None = None,
        keeps: bool = False,
    ) -> tuple[Parts, Kept | None]:
        """keeps: whether to return keys and values too."""
        attended, kept = self.self_attn(_each(self, "input_layernorm", parts), places, rotary, mask, past_key_values)
        parts = _sum(parts, attended)
        return _sum(parts, _each(self, "mlp", _each(self, "post_attention_layernorm", parts))), kept if keeps else None


class _Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(MixtureLayer(sizes) for _ in range(sizes.layers))
        self.norm, self.norm_moe_gen = RmsNorm(sizes.width, sizes.eps), RmsNorm(sizes.width, sizes.eps)


class _Language(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.model = _Decoder(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocab, bias=False)


class _Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma: Tensor) -> Tensor:
        """[U, D] of noise levels [U] in [0, 1]: they are not multiplied by 1000."""
        first: Any = self.mlp[0]
        return self.mlp(waves(sigma).to(first.weight.dtype))


class _Connector(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes.vision, sizes.width), nn.Linear(sizes.width, sizes.width)
        self.approximate = _GATES[sizes.connector_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class _Grid(nn.Module):
    """A table of places in an image, row by row. Fixed."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(side * side, width), requires_grad=False)


class Bagel(PublishedModule):
    """All of the checkpoint but the ViT and the VAE.

    The connector and the tables of places do not train.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^vit_model\.",)
    """Tensors of the checkpoint that `vision.Vision` loads."""
    others: ClassVar[tuple[str, ...]] = ("ae.safetensors",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.language_model = _Language(sizes)
        self.time_embedder = _Times(sizes.width)
        self.vae2llm, self.llm2vae = nn.Linear(sizes.latent, sizes.width), nn.Linear(sizes.width, sizes.latent)
        self.latent_pos_embed = _Grid(sizes.latent_side, sizes.width)
        self.connector = _Connector(sizes).requires_grad_(False)
        self.vit_pos_embed = _Grid(sizes.vision_side, sizes.width)

    def forward(
        self,
        mode: Mode,
        *,
        tokens: Tensor,
        keep: Tensor,
        positions: Tensor,
        blocks: Tensor,
        images: dict[str, Tensor] | None = None,
        cache: KeptLayers | None = None,
        index: Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """What the model makes of a batch of sequences, by `mode`.

        tokens: [B, L] int64; `sizes.vocab` stands for a VAE latent, the number after it for a ViT feature.
        keep: [B, cached + L] bool, False at padding.  positions: [B, L].
        blocks: [B, L] int64: 0 for text, else the number of the image whose tokens see each other.
        images: what those tokens stand for, in their order in the flattened batch: `latents` [N, C] at noise level
        `timesteps`[`levels`], `latent_places` [N]; `features` [M, V], `feature_places` [M].

        velocity: [len(index), C] of the latents at `index`.
        Else see `text_end`, which takes `index` and `settings`; the keys and values of each layer lie behind those of
        `cache`.
        """
        parts, places = self._embedded(tokens, images or {})
        decoder = self.language_model.model
        # Without images and with the padding at the end nothing but causality is left to mask.
        mask = None if mode in ("log_probs", "hidden") and not images else sight(keep, blocks)
        rotary = self._rotary(positions)
        kept: list[Kept] = []
        for number, layer in enumerate(decoder.layers):
            past = None if cache is None else cache.layers[number]
            parts, pair = layer(parts, places, rotary, mask, past_key_values=past, keeps=mode == "logits")
            if pair is not None:
                kept.append(pair)
        if mode == "velocity":
            assert index is not None, "velocities are those of places"
            return self.llm2vae(decoder.norm_moe_gen(parts[1].index_select(0, index)))
        states = places.whole(_each(decoder, "norm", parts))
        return self.text_end(mode, states, self.language_model.lm_head, kept=kept, index=index, **settings)

    def _embedded(self, tokens: Tensor, images: dict[str, Tensor]) -> tuple[Parts, _Places]:
        vocab = self.sizes.vocab
        text = self.language_model.model.embed_tokens(tokens.masked_fill(tokens >= vocab, 0)).flatten(0, 1)
        flat = tokens.flatten()
        features, latents = images.get("features"), images.get("latents")
        if features is not None and len(features):
            seen = self.connector(features.to(text.dtype)) + self.vit_pos_embed.pos_embed[images["feature_places"]]
            text = text.index_copy(0, (flat == vocab + 1).nonzero()[:, 0], seen.to(text.dtype))
        if latents is None or not len(latents):
            return (text,), _Places(len(tokens), ())
        times = self.time_embedder(images["timesteps"])[images["levels"]]
        places = self.latent_pos_embed.pos_embed[images["latent_places"]]
        noisy = self.vae2llm(latents.to(self.vae2llm.weight.dtype)) + times + places
        is_latent = flat == vocab
        own = ((~is_latent).nonzero()[:, 0], is_latent.nonzero()[:, 0])
        return (text.index_select(0, own[0]), noisy.to(text.dtype)), _Places(len(tokens), own)

    def _rotary(self, positions: Tensor) -> Kept:
        """Cosines and sines [B, 1, L, head] fp32."""
        head = self.sizes.width // self.sizes.heads
        steps = torch.arange(0, head, 2, dtype=torch.float32, device=positions.device) / head
        angles = positions[:, None, :, None].float() / self.sizes.rope_theta**steps
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def _each(module: nn.Module, name: str, parts: Parts) -> Parts:
    """The tokens of each expert through its own submodule of that name."""
    return tuple(module.get_submodule(name + expert)(part) for part, expert in zip(parts, _EXPERTS, strict=False))


def _sum(parts: Parts, others: Parts) -> Parts:
    return tuple(one + other for one, other in zip(parts, others, strict=True))
