"""Parts of transformers that generate text and images in one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.numerics.tokens.log_probs import output_logits, token_log_probs

from ..lazy_weights import CheckpointValues

__all__ = [
    "FREQUENCIES",
    "Kept",
    "KeptLayers",
    "Mode",
    "PublishedModule",
    "RmsNorm",
    "attended",
    "rotated",
    "sight",
    "waves",
]

FREQUENCIES = 256
"""Width of a timestep's sines and cosines."""
Kept: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values [B, K, L, head] of a layer."""
Mode: TypeAlias = Literal["velocity", "log_probs", "logits", "hidden"]


class KeptLayers:
    """Keys and values of every layer.

    Not a list: mixed precision casts the tensors in a module's inputs and outputs, those in lists too, and would
    convert the whole cache to fp32 and back for every token.
    """

    def __init__(self, layers: Sequence[Kept]) -> None:
        self.layers = layers


class PublishedModule(nn.Module):
    """The root of a transformer, in the names of a published checkpoint. Everything goes through its `forward(mode,
    ...)`: what shards the module gathers the weights of the root in its forward alone."""

    values: CheckpointValues
    """Where its weights are."""
    others: ClassVar[tuple[str, ...]] = ()
    """Files of the checkpoint with further weights."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights of the checkpoint with the module's values, as libraries save their models."""
        self.values.save(folder, self.state_dict(), others=self.others)

    def text_end(
        self,
        mode: Mode,
        states: Tensor,
        head: nn.Module,
        *,
        kept: Sequence[Kept],
        index: Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """What `mode` makes of the last states [B, L, D].

        logits: [B, V] fp32 after the last token, and `kept`, as `KeptLayers`.
        hidden: the states [T, D] at `index` of the flattened positions.
        log_probs: of `targets` there, see `token_log_probs`, which takes `settings`.
        """
        # An adapter wraps the layer and shows the weight below it: its own part would be left out without a word.
        if type(head) is not nn.Linear:
            raise RecipeError(
                "backend.lora.targets: got 'lm_head', but the model computes log-probs from the output projection "
                "itself and takes no adapter on it. Leave it out."
            )
        if mode == "logits":
            return output_logits(states[:, -1], head.weight), KeptLayers(kept)
        assert index is not None, "this mode takes places"
        hidden = states.flatten(0, 1).index_select(0, index)
        return hidden if mode == "hidden" else token_log_probs(hidden, head.weight, **settings)


class RmsNorm(nn.Module):
    """RMS norm, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def waves(values: Tensor) -> Tensor:
    """Cosines, then sines [N, FREQUENCIES] fp32 of timesteps [N]."""
    half = FREQUENCIES // 2
    steps = torch.arange(half, dtype=torch.float32, device=values.device) / half
    angles = values.float()[:, None] * torch.exp(-math.log(10000) * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotated(x: Tensor, rotary: Kept) -> Tensor:
    """x [..., head] turned by angles, whose cosines and sines [..., head] `rotary` has."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]


def sight(keep: Tensor, blocks: Tensor) -> Tensor:
    """[B, L, cached + L] bool: which tokens each sees: those before it, and those of its own image.

    keep: [B, cached + L] bool, False at padding.  blocks: [B, L] int64, 0 for text, else the number of the image.
    """
    length, total = blocks.shape[1], keep.shape[1]
    sees = torch.ones(length, total, dtype=torch.bool, device=keep.device).tril(total - length)
    mask = sees & keep[:, None]
    if length == total:
        mask = mask | ((blocks[:, :, None] == blocks[:, None]) & (blocks > 0)[:, :, None])
        # Padding sees itself: a softmax over nothing is NaN.
        mask = mask | torch.eye(length, dtype=torch.bool, device=keep.device)
    return mask


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, L, H head] of queries [B, H, L, head] to keys and values [B, K, cached + L, head].

    mask: as `sight` gives it; None is causal."""
    shared = q.shape[1] // k.shape[1]
    if mask is None:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)
    else:
        # Of the kernels that take a mask, only the slowest takes fewer keys than heads.
        keys, values = (one.repeat_interleave(shared, dim=1) for one in (k, v))
        output = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None])
    return output.transpose(1, 2).flatten(2)
