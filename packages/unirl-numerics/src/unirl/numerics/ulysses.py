"""Attention over tokens that the ranks of a group share: an exchange of tokens for attention heads, and back.

Each rank holds a part of the tokens, the parts as equal as their number allows, so any length can be shared.
Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from unirl.core.errors import RecipeError

__all__ = ["KEY", "SharedCall", "check_heads", "gather_parts", "own_part", "part_sizes", "share_attention"]

KEY = "backend.mesh.sequence"
"""Key of the setting that errors are about."""


def part_sizes(length: int, ranks: int) -> list[int]:
    """Tokens of each rank: the first `length % ranks` ranks have one more."""
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


def own_part(whole: Tensor, mesh: Any, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks of the mesh hold. Its gradient is that of the part alone."""
    rank: int = mesh.get_local_rank()
    sizes = part_sizes(whole.shape[dim], mesh.size())
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])


def gather_parts(part: Tensor, mesh: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of all ranks after each other, the same on all. Collective.

    sizes: of the parts along `dim`, by rank.  The gradient of a part is its slice of this rank's gradient of the whole:
    ranks that compute the same loss from the whole have the gradients of their parts.
    """
    return cast("Any", _GatherParts).apply(part, mesh, dim, tuple(sizes))


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Any, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.start, ctx.size = dim, sum(sizes[: mesh.get_local_rank()]), part.shape[dim]
        first = part.movedim(dim, 0)
        # Gloo gathers tensors of one size.
        padded = first.new_zeros(max(sizes), *first.shape[1:])
        padded[: len(first)] = first
        parts = [torch.empty_like(padded) for _ in sizes]
        cast("Any", dist).all_gather(parts, padded, group=mesh.get_group())
        whole = torch.cat([piece[:size] for piece, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(ctx.dim, ctx.start, ctx.size), None, None, None


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows: `give` of them to each rank, `take` from each. torch's own with a gradient returns a
    tensor that is still on its way, whose memory attention would keep beside a copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: list[int], give: list[int], group: Any) -> Tensor:
        ctx.take, ctx.give, ctx.group = take, give, group
        received = rows.new_empty(sum(take), *rows.shape[1:])
        cast("Any", dist).all_to_all_single(received, rows.contiguous(), take, give, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], take=ctx.give, give=ctx.take, group=ctx.group), None, None, None


def _exchanged(rows: Tensor, *, take: list[int], give: list[int], group: Any) -> Tensor:
    return cast("Any", _Exchange).apply(rows, take, give, group)


def check_heads(heads: int, mesh: Any, *, of: str) -> None:
    """Raise RecipeError for attention heads that the ranks of a mesh cannot share evenly. of: the module's name."""
    ranks = mesh.size()
    if heads % ranks:
        raise RecipeError(
            f"{KEY}: got {ranks}, but the {heads} attention heads of the checkpoint's {of} cannot be shared evenly by "
            f"{ranks} ranks. Use a divisor of {heads}."
        )


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A call of attention on a part of the tokens."""

    arguments: Mapping[str, Any]
    """Arguments of the attention's forward, by name, with everything cut to this rank's tokens."""
    lengths: Sequence[int]
    """Tokens of each rank."""
    mask: Tensor | None = None
    """Mask of all tokens in rank order, [B or 1, 1, S or 1, S] bool or additive, in place of the module's."""
    is_causal: bool = False
    builds_mask: bool = False
    """Whether the module builds a mask of this rank's tokens, which `mask` replaces; otherwise one is refused."""


def share_attention(attention: nn.Module, mesh: Any, *, shared: Callable[[dict[str, Any]], SharedCall | None]) -> None:
    """Make the forward of a module attend to the tokens of all ranks of a mesh, in place.

    shared: takes the arguments of a call by name; returns None where they are not shared. It depends on them alone, as
    activation checkpointing repeats the call.
    The module calls `torch.nn.functional.scaled_dot_product_attention` on [B, heads, tokens, width]; a forward of other
    attention, which would see this rank's tokens alone, raises RecipeError.
    """
    forward = attention.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def exchanging(*args: Any, **kwargs: Any) -> Any:
        named: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named.update(value if is_rest else {name: value})
        call = shared(named)
        if call is None:
            return forward(*args, **kwargs)
        with _HeadExchange(mesh, call) as exchange:
            result = forward(**call.arguments)
        if not exchange.num_calls:
            raise RecipeError(
                f"{KEY}: got {mesh.size()}, but {type(attention).__name__} does not compute attention by torch's "
                "scaled_dot_product_attention, so it cannot be shared. Choose that attention (sdpa), or use 1."
            )
        return result

    attention.forward = exchanging


class _HeadExchange(TorchFunctionMode):
    """Inside it `scaled_dot_product_attention` takes a rank's tokens of all heads, and attends for a part of the heads
    to the tokens of all ranks."""

    def __init__(self, mesh: Any, call: SharedCall) -> None:
        super().__init__()
        self._group: dist.ProcessGroup = mesh.get_group()
        self._lengths = list(call.lengths)
        self._own: int = self._lengths[mesh.get_local_rank()]
        self._mask, self._is_causal, self._builds_mask = call.mask, call.is_causal, call.builds_mask
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # The mask and `is_causal` are of this rank's tokens; those of all come with the call.
        del is_causal
        if attn_mask is not None and not self._builds_mask:
            raise RecipeError(
                f"{KEY}: got {len(self._lengths)}, but the model passes its own attention mask or bias, which covers "
                "only one rank's tokens. Use 1."
            )
        if key.shape[1] % len(self._lengths):
            # Fewer heads of keys than ranks: each of the query's heads brings its own.
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
            enable_gqa = False
        query, key, value = self._to_heads(query, key, value)
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._mask,
            dropout_p=dropout_p,
            is_causal=self._is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return self._to_tokens(result)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Each [B, H, own tokens, D] -> [B, H / ranks, all tokens, D]; H and D may differ between tensors.

        In one exchange: several take longer, and the more so the fewer tokens there are.
        """
        ranks, own, batch = len(self._lengths), self._own, tensors[0].shape[0]
        widths = [x.shape[3] for x in tensors]
        # By receiving rank: [ranks, own tokens, B, H / ranks x D].
        parts = [x.reshape(batch, ranks, -1, own, x.shape[3]).permute(1, 3, 0, 2, 4).flatten(3) for x in tensors]
        sent = torch.cat(parts, dim=3).flatten(0, 1)
        received = _exchanged(sent, take=self._lengths, give=[own] * ranks, group=self._group)
        pieces = torch.split(received, [part.shape[3] for part in parts], dim=2)
        return [
            piece.reshape(-1, batch, piece.shape[2] // width, width).permute(1, 2, 0, 3)
            for piece, width in zip(pieces, widths, strict=True)
        ]

    def _to_tokens(self, x: Tensor) -> Tensor:
        """[B, H / ranks, all tokens, D] -> [B, H, own tokens, D]."""
        ranks, own = len(self._lengths), self._own
        sent = x.permute(2, 0, 1, 3)
        received = _exchanged(sent, take=[own] * ranks, give=self._lengths, group=self._group)
        return received.reshape(ranks, own, *received.shape[1:]).permute(2, 0, 3, 1, 4).flatten(1, 2)
