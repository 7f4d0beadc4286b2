"""Sequence parallelism of diffusers' video transformers: where they have the tokens that ranks share.

Calls diffusers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.numerics.ulysses import KEY, SharedCall, check_heads, gather_parts, own_part, part_sizes, share_attention

__all__ = ["TokenSplit", "split_transformer"]


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """Places of the tokens that ranks share in a transformer. `proj_out` is applied to the latents' ones at its end."""

    blocks: tuple[str, ...]
    """Lists of blocks, in the order in which they run. The first argument of a block are the tokens of the latents."""
    attention: str
    """Name of a block's attention over these tokens."""
    rotary: str
    """Argument of that attention: a pair of tables with one entry for each token of all ranks."""
    rotary_dim: int
    """Dim of the tokens in those tables."""
    joins_texts: bool = False
    """Whether the second argument of a block are tokens of the text, which that attention joins behind those of the
    latents. Its `attention_mask` is [B, texts], or [B, 1, 1, latents + texts]."""


def split_transformer(transformer: nn.Module, mesh: Any, split: TokenSplit) -> None:
    """Split the tokens of every forward over the ranks of a mesh, in place: each rank computes its part of them in the
    blocks, and attention exchanges them for a part of the heads. The output is whole on every rank.

    Every rank's gradient is that of its own tokens, for all parameters: they lie before the output is gathered.

    mesh: a `DeviceMesh` of one dim. The parts are as equal as the number of tokens allows.
    Raises RecipeError for unsupported attention, leaving the model unmodified, and in a forward with fewer tokens than
    ranks.
    """
    module: Any = transformer
    check_heads(module.config.num_attention_heads, mesh, of=type(transformer).__name__)
    blocks: list[nn.Module] = [block for name in split.blocks for block in module.get_submodule(name)]
    layers = [block.get_submodule(split.attention) for block in blocks]
    for layer in layers:
        processor = cast("Any", layer).processor
        # Of those of diffusers, these attend by torch's function, unless another backend is chosen.
        if not hasattr(processor, "_parallel_config"):
            raise RecipeError(
                f"{KEY}: got {mesh.size()}, but attention by {type(processor).__name__} cannot be split. Use 1."
            )
    for layer in layers:
        share_attention(layer, mesh, shared=lambda named: _shared(named, mesh, split))
    ranks, sizes = mesh.size(), list[int]()

    def enter(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        latents, *rest = args
        if latents.shape[1] < ranks:
            raise RecipeError(
                f"{KEY}: got {ranks}, but a latent has {latents.shape[1]} tokens. Choose a larger size in sampling, or "
                "fewer ranks."
            )
        sizes[:] = part_sizes(latents.shape[1], ranks)
        if split.joins_texts:
            rest[0] = own_part(_padded(rest[0], dim=1, ranks=ranks), mesh, dim=1)
        return (own_part(latents, mesh, dim=1), *rest), kwargs

    def leave(_layer: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather_parts(output, mesh, 1, sizes)

    blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    module.proj_out.register_forward_hook(leave)


def _shared(named: dict[str, Any], mesh: Any, split: TokenSplit) -> SharedCall:
    ranks, tables = mesh.size(), cast("Sequence[Tensor]", named[split.rotary])
    num_latents = tables[0].shape[split.rotary_dim]
    latents = part_sizes(num_latents, ranks)
    own = {**named, split.rotary: tuple(own_part(table, mesh, split.rotary_dim) for table in tables)}
    if not split.joins_texts:
        return SharedCall(arguments=own, lengths=latents)
    mask: Tensor = named["attention_mask"]
    is_joint = mask.ndim == 4
    known = _padded(mask.flatten(1)[:, num_latents if is_joint else 0 :].bool(), dim=1, ranks=ranks)
    texts = part_sizes(known.shape[1], ranks)
    pieces = zip(latents, cast("Any", known).split(texts, dim=1), strict=True)
    keys = torch.cat([x for latent, text in pieces for x in (text.new_ones(len(text), latent), text)], dim=1)
    return SharedCall(
        # A mask of both is not read; one of the text alone is widened to the tokens here.
        arguments={**own, "attention_mask": None if is_joint else own_part(known, mesh, dim=1)},
        lengths=[latent + text for latent, text in zip(latents, texts, strict=True)],
        mask=keys[:, None, None],
        builds_mask=not is_joint,
    )


def _padded(texts: Tensor, *, dim: int, ranks: int) -> Tensor:
    """Texts with at least one token for each rank; those that are added are masked."""
    missing = max(0, ranks - texts.shape[dim])
    return F.pad(texts, (0, 0) * (texts.ndim - 1 - dim) + (0, missing)) if missing else texts
