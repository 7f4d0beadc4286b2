"""Tokens that are chosen from some of the vocabulary alone: which they are, and the maths over what was allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError, RunFailed

from .output_rows import result_dtype

if TYPE_CHECKING:
    from unirl.core.roles import TextModel

__all__ = [
    "RestrictedTargets",
    "RuledModel",
    "allowed_tokens",
    "narrowed_logits",
    "restricted_targets",
    "target_restrictions",
    "trained_tokens",
]


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def restricts(self) -> AbstractSet[str]: ...


class RuledModel(Protocol):
    """The part of a `TextModel` that says which tokens may be drawn."""

    @property
    def spec(self) -> _Named: ...

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """See `TextModel.allowed`."""
        ...


def allowed_tokens(model: RuledModel, tokens: Tensor, *, options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Position -> ids [K] int64, rising, where `model` allows some alone; none for a model that restricts nothing.

    tokens: [L] int64 on the CPU.  Raises RunFailed for sets that are not token ids or are empty, and for a position
    past L.
    """
    if not model.spec.restricts:
        return {}
    result: dict[int, Tensor] = {}
    for place, ids in model.allowed(tokens, options=options).items():
        name = f"model {model.spec.name!r}: allowed() gives position {place}"
        if not 0 <= place <= len(tokens):
            raise RunFailed(f"{name} of a completion of {len(tokens)} tokens, expected 0 to {len(tokens)}.")
        if ids.ndim != 1 or ids.dtype != torch.int64:
            raise RunFailed(f"{name} {ids.dtype} {list(ids.shape)}, expected 1-D int64 token ids.")
        if not len(ids):
            raise RunFailed(f"{name} no token, expected one or more; leave out positions where every token may be.")
        if int(ids.min()) < 0:
            raise RunFailed(f"{name} token {int(ids.min())}, expected ids from 0.")
        # Twice the same id would count twice in a softmax.
        untyped: Any = ids.cpu()
        result[place] = untyped.unique()
    return result


def target_restrictions(
    model: TextModel, completions: Sequence[Tensor], *, options: Mapping[str, Any]
) -> dict[int, Tensor]:
    """`TokenBatch.allowed` of these completions: number of a target -> ids that its token was chosen from.

    completions: n of [L_i] int64.  Raises BatchError for a token that was not allowed.
    """
    result: dict[int, Tensor] = {}
    start = 0
    for row, tokens in enumerate(completions):
        tokens = tokens.cpu()
        for place, ids in allowed_tokens(model, tokens, options=options).items():
            if place == len(tokens):
                continue  # the one after the last, which was not generated
            if not bool((ids == tokens[place]).any()):
                raise BatchError(
                    f"TextSegment.tokens: row {row} has token {int(tokens[place])} at position {place}, expected "
                    f"{_some(ids)}, which model {model.spec.name!r} allows there. Generate it by the model's rules."
                )
            result[start + place] = ids
        start += len(tokens)
    return result


def trained_tokens(
    model: TextModel, completions: Sequence[Tensor], *, options: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """`TextSegment.mask` of these completions, per row [L_i] bool: False where the model forces the token. None for a
    model that restricts nothing. Raises BatchError for a token that was not allowed."""
    if not model.spec.restricts:
        return None
    forced = [place for place, ids in target_restrictions(model, completions, options=options).items() if len(ids) == 1]
    mask: Any = torch.ones(sum(map(len, completions)), dtype=torch.bool)
    mask[forced] = False
    return tuple(row.clone() for row in mask.split([len(tokens) for tokens in completions]))


def narrowed_logits(logits: Tensor, allowed: Sequence[Tensor | None], *, model: str) -> Tensor:
    """The logits [B, V] with -inf for all tokens but those allowed in a row; None allows all.

    model: its name.  Raises RunFailed for an id past the vocabulary.
    """
    result = logits.clone()
    for row, ids in enumerate(allowed):
        if ids is None:
            continue
        if int(ids.max()) >= logits.shape[1]:
            raise RunFailed(
                f"model {model!r}: allowed() gives token {int(ids.max())}, expected ids below {logits.shape[1]}, the "
                "size of its vocabulary."
            )
        there = ids.to(logits.device)
        result[row] = -torch.inf
        result[row, there] = logits[row, there]
    return result


@dataclass(frozen=True)
class _Group:
    """Targets with the same allowed tokens."""

    places: Tensor
    """[r] int64, numbers of the targets."""
    words: Tensor
    """[K] int64, K > 1, indices into `RestrictedTargets.words`."""
    chosen: Tensor
    """[r] int64, indices into `words` of the targets' tokens."""


@dataclass(frozen=True)
class RestrictedTargets:
    """Targets of a batch by what their tokens were chosen from. Those that were forced are in none of them."""

    free: Tensor
    """[F] int64, numbers of the targets chosen from the whole vocabulary."""
    words: Tensor
    """[W] int64, every token that some restricted target may have."""
    groups: tuple[_Group, ...]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        """Of each group [r, K], in fp32 (fp64 for fp64 inputs), from the rows of the output projection that are
        allowed alone. Differentiable.

        hidden: [T, D].  weight: [V, D].  bias: [V].
        """
        dtype = result_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            # Once for all groups: the gradient of each selection is as large as the weight.
            rows = weight.index_select(0, self.words).to(dtype)
            shifts = None if bias is None else bias.index_select(0, self.words).to(dtype)
            result: list[Tensor] = []
            for group in self.groups:
                logits = hidden[group.places].to(dtype) @ rows[group.words].T
                result.append(logits if shifts is None else logits + shifts[group.words])
            return result


def restricted_targets(allowed: Mapping[int, Tensor], targets: Tensor, *, num_words: int) -> RestrictedTargets:
    """allowed: as `TokenBatch.allowed`.  targets: [T] int64.  num_words: size of the vocabulary.

    Raises ValueError for a number past the targets, an empty set, ids past the vocabulary, and a target that is not
    among its own.
    """
    tokens: list[int] = cast("Any", targets).tolist()
    by_set: dict[tuple[int, ...], list[int]] = {}
    for place, ids in sorted(allowed.items()):
        key = tuple(sorted(set(cast("list[int]", cast("Any", ids).tolist()))))
        if not 0 <= place < len(tokens):
            raise ValueError(f"allowed: got target {place}, expected 0 to {len(tokens) - 1}.")
        if not key or key[0] < 0 or key[-1] >= num_words:
            raise ValueError(
                f"allowed: got {_some(key)} for target {place}, expected one or more token ids below {num_words}."
            )
        if tokens[place] not in key:
            raise ValueError(f"allowed: target {place} is token {tokens[place]}, expected one of {_some(key)}.")
        by_set.setdefault(key, []).append(place)
    is_free = torch.ones(len(tokens), dtype=torch.bool)
    is_free[[*allowed]] = False
    words = sorted({word for key in by_set if len(key) > 1 for word in key})
    at = {word: place for place, word in enumerate(words)}

    def index(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=targets.device)

    return RestrictedTargets(
        free=is_free.nonzero()[:, 0].to(targets.device),
        words=index(words),
        groups=tuple(
            _Group(index(places), index([at[word] for word in key]), index([key.index(tokens[at_]) for at_ in places]))
            for key, places in by_set.items()
            if len(key) > 1
        ),
    )


def _some(ids: Tensor | Sequence[int]) -> str:
    values: list[int] = cast("Any", ids).tolist() if isinstance(ids, Tensor) else [*ids]
    return f"{values[:8]}"[:-1] + (", ...]" if len(values) > 8 else "]")
