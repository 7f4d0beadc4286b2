"""HunyuanImage-3.0's transformer in the names of its published checkpoint: a decoder with a mixture of experts in every
layer, an input of noisy latents and an output of velocities.

Source: HunyuanImage 3.0 Technical Report, arXiv 2509.23951, and the shapes of the published checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from unirl.model_host.lazy_weights import Piece
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

from .checkpoint import GROUPS, Sizes

__all__ = ["TIMESTEPS", "ExpertsLayer", "HunyuanImage", "Stand", "angles", "expert_pieces"]

TIMESTEPS = 1000
"""Timestep of the noise level 1."""
_LEAST_WEIGHT = 1e-8
"""Smallest sum that the weights of a token's experts are divided by."""


@dataclass(frozen=True)
class Stand:
    """Numbers of a sequence that are no tokens of the vocabulary, and what they stand for."""

    vocab: int

    @property
    def latent(self) -> int:
        """A latent of a source image."""
        return self.vocab

    @property
    def feature(self) -> int:
        """A ViT feature of one."""
        return self.vocab + 1

    @property
    def noisy(self) -> int:
        """A latent of the image that is generated."""
        return self.vocab + 2

    @property
    def clean_time(self) -> int:
        """The timestep of a source image, 0."""
        return self.vocab + 3

    @property
    def time(self) -> int:
        """The timestep of the image that is generated."""
        return self.vocab + 4


def expert_pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """The checkpoint stores every expert by itself, its two inputs in one tensor, up first. Here the experts of a layer
    are joined, gate first: what splits them over ranks takes [experts, 2 width, hidden]."""
    layer, _, kind = name.rpartition(".experts.")
    if not layer:
        return []
    width = shape[1] // 2
    size = (1, width, shape[2]) if kind == "gate_up_proj" else (1, *shape[1:])
    # Start in the joined tensor, and in the stored one.
    parts = [(0, width), (width, 0)] if kind == "gate_up_proj" else [(0, 0)]
    stored = "gate_and_up_proj" if kind == "gate_up_proj" else "down_proj"
    return [
        Piece(name=f"{layer}.experts.{expert}.{stored}.weight", start=(expert, here, 0), size=size, source=(there, 0))
        for expert in range(shape[0])
        for here, there in parts
    ]


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head, self.kv_heads, self.shared = sizes.head, sizes.kv_heads, sizes.heads // sizes.kv_heads
        self.qkv_proj = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.head, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head, sizes.width, bias=False)
        self.query_layernorm, self.key_layernorm = RmsNorm(sizes.head, sizes.eps), RmsNorm(sizes.head, sizes.eps)

    def forward(self, x: Tensor, rotary: Kept, mask: Tensor | None, past: Kept | None) -> tuple[Tensor, Kept]:
        # Rows of the weight are grouped by key: its queries, the key, the value.
        grouped = self.qkv_proj(x).unflatten(-1, (self.kv_heads, self.shared + 2, self.head))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in grouped.split([self.shared, 1, 1], dim=3))
        # Norms come after the rotation.
        q = self.query_layernorm(rotated(q.float(), rotary)).to(v.dtype)
        k = self.key_layernorm(rotated(k.float(), rotary)).to(v.dtype)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return self.o_proj(attended(q, k, v, mask)), (k, v)


class _SharedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_and_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class _Gate(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wg = nn.Linear(sizes.width, sizes.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities [N, E] fp32 of states [N, D], whatever an autocast says."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.wg.weight.float()).softmax(dim=-1)


class _Mixture(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.chosen = sizes.chosen[layer]
        self.gate = _Gate(sizes)
        self.shared_mlp = _SharedMlp(sizes.width, sizes.shared[layer])
        config = cast(Any, Qwen3MoeConfig)(
            num_experts=sizes.experts,
            hidden_size=sizes.width,
            moe_intermediate_size=sizes.inner[layer],
            hidden_act="silu",
            experts_implementation="grouped_mm" if torch.cuda.is_available() else "eager",
        )
        self.experts = cast(Any, Qwen3MoeExperts)(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, experts = self.gate(flat).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_LEAST_WEIGHT)
        return self.shared_mlp(x) + self.experts(flat, experts, weights.to(x.dtype)).view_as(x)


class ExpertsLayer(nn.Module):
    """A layer of the decoder."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(sizes), _Mixture(sizes, layer)
        self.input_layernorm = RmsNorm(sizes.width, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.width, sizes.eps)

    def forward(
        self, x: Tensor, rotary: Kept, mask: Tensor | None, past_key_values: Kept | None = None, keeps: bool = False
    ) -> tuple[Tensor, Kept | None]:
        """keeps: whether to return keys and values too."""
        seen, kept = self.self_attn(self.input_layernorm(x), rotary, mask, past_key_values)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), kept if keeps else None


class _Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(ExpertsLayer(sizes, layer) for layer in range(sizes.layers))
        self.ln_f = RmsNorm(sizes.width, sizes.eps)


class _Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, timesteps: Tensor) -> Tensor:
        """[N, D] of timesteps [N] in [0, 1000]."""
        first: Any = self.mlp[0]
        return self.mlp(waves(timesteps).to(first.weight.dtype))


class _Residual(nn.Module):
    """A block of convolutions, whose second norm is scaled and shifted by the timestep."""

    def __init__(self, inside: int, outside: int, *, times: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(times, 2 * outside))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, outside), nn.SiLU(), nn.Identity(), nn.Conv2d(outside, outside, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        scale, shift = self.emb_layers(times)[..., None, None].chunk(2, dim=1)
        states = self.out_layers[0](self.in_layers(x)) * (1 + scale) + shift
        return self.skip_connection(x) + self.out_layers[1:](states)


class _End(nn.Module):
    """From latents to states or back."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleList(parts)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        for part in self.model:
            x = part(x, times) if isinstance(part, _Residual) else part(x)
        return x


class _Aligner(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Linear(sizes.vision, sizes.width)]
        for _ in range(1, sizes.vision_depth):
            parts += [nn.GELU(), nn.Linear(sizes.width, sizes.width)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        return self.layers(x.to(first.weight.dtype))


class HunyuanImage(PublishedModule):
    """All of the checkpoint but the ViT and the VAE. What aligns the ViT's features does not train."""

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^vae\.", r"^vision_model\.")
    """Tensors of the checkpoint that `images.Images` loads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, patch = sizes.width, sizes.patch
        self.sizes, self.stand = sizes, Stand(sizes.vocab)
        self.model = _Decoder(sizes)
        self.lm_head = nn.Linear(width, sizes.vocab, bias=False)
        self.timestep_emb, self.time_embed, self.time_embed_2 = _Times(width), _Times(width), _Times(width)
        self.patch_embed = _End(nn.Conv2d(sizes.latent, patch, 3, padding=1), _Residual(patch, width, times=width))
        last = nn.Sequential(nn.GroupNorm(GROUPS, patch), nn.SiLU(), nn.Conv2d(patch, sizes.latent, 3, padding=1))
        self.final_layer = _End(_Residual(width, patch, times=width), last)
        self.vision_aligner = _Aligner(sizes).requires_grad_(False)

    def forward(
        self,
        mode: Mode,
        *,
        tokens: Tensor,
        keep: Tensor,
        positions: Tensor,
        blocks: Tensor,
        images: dict[str, Any] | None = None,
        cache: KeptLayers | None = None,
        index: Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """What the model makes of a batch of sequences, by `mode`.

        tokens: [B, L] int64, with the numbers of `Stand`.  keep: [B, cached + L] bool, False at padding.
        positions: [B, L].
        blocks: [B, L] int64: 0 for text, else the number of the image whose tokens see each other.
        images: what those numbers stand for, in their order in the flattened batch: `latents` of source images, a
        tuple of [C, h, w]; `features` [M, V]; `noisy` [B, C, h, w] at `timesteps` [B] in [0, 1000]; and `moves` [N, 2],
        what the row and the column of each latent and feature add to its position.

        velocity: [B, C, h, w] of `noisy`.
        Else see `text_end`, which takes `index` and `settings`; the keys and values of each layer lie behind those of
        `cache`.
        """
        images, decoder = images or {}, self.model
        x = self._embedded(tokens, images)
        # Without images and with the padding at the end nothing but causality is left to mask.
        mask = None if mode in ("log_probs", "hidden") and not images else sight(keep, blocks)
        rotary = self._rotary(tokens, positions, images)
        kept: list[Kept] = []
        for number, layer in enumerate(decoder.layers):
            past = None if cache is None else cache.layers[number]
            x, pair = layer(x, rotary, mask, past_key_values=past, keeps=mode == "logits")
            if pair is not None:
                kept.append(pair)
        if mode == "velocity":
            # Without the norm that log-probs have.
            states = x[tokens == self.stand.noisy].unflatten(0, (len(tokens), -1)).transpose(1, 2)
            grid = states.unflatten(2, images["noisy"].shape[2:])
            return self.final_layer(grid, self.time_embed_2(images["timesteps"]))
        return self.text_end(mode, decoder.ln_f(x), self.lm_head, kept=kept, index=index, **settings)

    def _embedded(self, tokens: Tensor, images: dict[str, Any]) -> Tensor:
        stand, width = self.stand, self.sizes.width
        flat = tokens.flatten()
        x = self.model.wte(flat.masked_fill(flat >= stand.vocab, 0))

        def put(number: int, values: Tensor) -> Tensor:
            return x.index_copy(0, (flat == number).nonzero()[:, 0], values.to(x.dtype))

        first: Any = self.patch_embed.model[0]
        if latents := images.get("latents"):
            zero = torch.zeros(1, device=x.device)
            parts = [self.patch_embed(one[None].to(first.weight.dtype), self.time_embed(zero)) for one in latents]
            x = put(stand.latent, torch.cat([part[0].flatten(1).T for part in parts]))
            x = put(stand.clean_time, self.timestep_emb(zero).expand(len(latents), width))
        if (features := images.get("features")) is not None and len(features):
            x = put(stand.feature, self.vision_aligner(features))
        if (noisy := images.get("noisy")) is not None:
            times = images["timesteps"]
            states = self.patch_embed(noisy.to(first.weight.dtype), self.time_embed(times))
            x = put(stand.noisy, states.flatten(2).transpose(1, 2).flatten(0, 1))
            x = put(stand.time, self.timestep_emb(times))
        return x.unflatten(0, tokens.shape)

    def _rotary(self, tokens: Tensor, positions: Tensor, images: dict[str, Any]) -> Kept:
        """Cosines and sines [B, 1, L, head] fp32."""
        places = positions[..., None].repeat(1, 1, 2)
        if images:
            stand = self.stand
            is_image = ((tokens >= stand.latent) & (tokens <= stand.noisy)).flatten().nonzero()[:, 0]
            places = places.flatten(0, 1).index_add(0, is_image, images["moves"]).view_as(places)
        each = angles(places, head=self.sizes.head, theta=self.sizes.rope_theta).repeat(1, 1, 2)[:, None]
        return each.cos(), each.sin()


def angles(places: Tensor, *, head: int, theta: float) -> Tensor:
    """Angles [..., head / 2] fp32 that queries and keys are turned by, of rows and columns [..., 2]: frequencies take
    the two in turns."""
    steps = torch.arange(0, head, 2, dtype=torch.float32, device=places.device) / head
    return places.repeat(*(1,) * (places.ndim - 1), head // 4).float() / theta**steps
