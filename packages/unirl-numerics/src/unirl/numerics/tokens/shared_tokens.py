"""Sequence parallelism of transformers' causal language models: ranks share the tokens of every row."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError

from ..ulysses import KEY, SharedCall, check_heads, gather_parts, own_part, part_sizes, share_attention

__all__ = ["OwnTargets", "SharedTokens"]


class SharedTokens:
    """The tokens of forwards inside `splitting`, shared by the ranks of a mesh: each computes its part of every row in
    the decoder's layers, and attention exchanges tokens for heads. Other forwards, such as those with a cache, stay
    whole on every rank.
    """

    def __init__(self, trunk: nn.Module, mesh: Any, *, attention: str) -> None:
        """trunk: of transformers, changed in place.  attention: its implementation, by transformers' name.

        Raises RecipeError for unsupported attention, leaving the model unmodified.
        """
        decoder: Any = trunk
        name = type(decoder).__name__
        if attention != "sdpa":
            raise RecipeError(
                f"{KEY}: got {mesh.size()} with model.attention={attention}, which would see the tokens of one rank "
                "alone. Set model.attention=sdpa, or use 1."
            )
        check_heads(decoder.config.get_text_config().num_attention_heads, mesh, of=name)
        layers: list[nn.Module] = list(getattr(decoder, "layers", ()))
        attentions = [getattr(layer, "self_attn", None) for layer in layers]
        known = [one for one in attentions if one is not None and _takes_rotations(one)]
        if not layers or len(known) < len(layers):
            raise RecipeError(
                f"{KEY}: got {mesh.size()}, but not every layer of {name} has attention with rotary positions "
                "(`self_attn`, `position_embeddings`), so its tokens cannot be shared. Use 1."
            )
        self.mesh, self._is_splitting = mesh, False
        for one in known:
            share_attention(one, mesh, shared=self._shared)
        layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)

    @contextmanager
    def splitting(self) -> Generator[None]:
        """Forwards of the trunk give the hidden states [B, own, D] of this rank's tokens."""
        self._is_splitting = True
        try:
            yield
        finally:
            self._is_splitting = False

    def _enter(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_splitting:
            return None
        # Layers of transformers take no tensor without tokens: rows shorter than the ranks stay whole on each.
        if args[0].shape[1] < self.mesh.size():
            return None
        return (own_part(args[0], self.mesh, dim=1), *args[1:]), kwargs

    def _shared(self, named: dict[str, Any]) -> SharedCall | None:
        tables: tuple[Tensor, ...] = named["position_embeddings"]
        length = tables[0].shape[1]
        if named["hidden_states"].shape[1] == length:
            return None
        mask: Tensor | None = named.get("attention_mask")
        own = {**named, "attention_mask": None, "position_embeddings": [own_part(x, self.mesh, 1) for x in tables]}
        lengths = part_sizes(length, self.mesh.size())
        return SharedCall(arguments=own, lengths=lengths, mask=mask, is_causal=mask is None)


class OwnTargets:
    """Those of a batch's targets whose predictions this rank's tokens make, and the way back to all of them."""

    def __init__(self, target_index: Tensor, *, length: int, mesh: Any) -> None:
        """target_index: [T] into the flattened [B * length] positions."""
        self._mesh = mesh
        rank: int = mesh.get_local_rank()
        sizes = part_sizes(length, mesh.size())
        ends = torch.tensor(sizes, device=target_index.device).cumsum(0)
        row, place = target_index // length, target_index % length
        holder = torch.searchsorted(ends, place, right=True)
        order = holder.argsort(stable=True)
        self._counts: list[int] = cast("Any", holder.bincount(minlength=len(sizes))).tolist()
        self._back = order.argsort()
        self.which = (holder == rank).nonzero().flatten()
        """[own T] of [T]."""
        is_split = length >= mesh.size()
        self._index = (row * sizes[rank] + place - sum(sizes[:rank]) if is_split else target_index)[self.which]

    def hidden(self, states: Tensor) -> Tensor:
        """[B, own, D] of this rank's tokens, or of all of rows shorter than the ranks -> [own T, D]."""
        return states.flatten(0, 1)[self._index]

    def allowed(self, allowed: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The restrictions of this rank's targets, by their numbers among these."""
        if not allowed:
            return {}
        own: list[int] = cast("Any", self.which).tolist()
        return {place: allowed[number] for place, number in enumerate(own) if number in allowed}

    def gather(self, values: Tensor) -> Tensor:
        """[own T, ...] -> [T, ...], the same on all ranks; its gradient is that of a rank's own. Collective."""
        return gather_parts(values, self._mesh, 0, self._counts)[self._back]

    def whole_use(self, weight: Tensor) -> Tensor:
        """A weight that every rank uses for all targets: a rank's gradient is its share of one such use."""

        def share(gradient: Tensor) -> Tensor:
            return gradient / self._mesh.size()

        shared = weight.view_as(weight)
        if shared.requires_grad:
            cast("Any", shared).register_hook(share)
        return shared


def _takes_rotations(attention: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(attention.forward).parameters
