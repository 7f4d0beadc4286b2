"""Batches prompts and completions of any length for a language model, padded or packed, and splits them by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.roles import TokenBatch
from unirl.core.types.array import Ragged
from unirl.numerics.balance import check_costs

__all__ = ["TokenLoad", "from_rows", "micro_batches_by_tokens", "pack_batch", "pad_batch", "to_rows"]


def pad_batch(
    prompts: Sequence[Tensor],
    tokens: Sequence[Tensor],
    *,
    pad_token: int,
    conditions: Mapping[str, Ragged] | None = None,
) -> TokenBatch:
    """[n, S]: in each row the prompt, the tokens, and padding on the right.

    prompts: n of [P_i] int64, P_i >= 1.  tokens: n of [L_i] int64; L_i = 0 is a row without targets.
    conditions: name -> n entries, of models that read media.
    With padding on the right, causal attention never sees it, so the mask does not change the result, and S is the
    largest P_i + L_i, which may be less than the largest P plus the largest L. Positions keep counting over the
    padding, whose outputs are unused.

    Raises ValueError naming the row whose prompt is empty or whose tokens are not 1-D int64.
    """
    flat, sizes = _flattened(prompts, tokens)
    longest = max(sizes)
    places = torch.arange(longest, device=flat.device).expand(len(sizes), longest)
    mask = places < torch.tensor(sizes, device=flat.device)[:, None]
    lengths, rows, index = _target_places(prompts, tokens, starts=[row * longest for row in range(len(sizes))])
    return TokenBatch(
        # At once: a copy for each row takes longer than the layers of a small model.
        tokens=flat.new_full(mask.shape, pad_token).masked_scatter(mask, flat),
        positions=places.contiguous(),
        attention_mask=mask,
        cu_seqlens=None,
        max_length=longest,
        target_index=index,
        targets=torch.cat(list(tokens)),
        rows=rows,
        lengths=lengths,
        conditions=conditions or {},
    )


def pack_batch(
    prompts: Sequence[Tensor], tokens: Sequence[Tensor], *, conditions: Mapping[str, Ragged] | None = None
) -> TokenBatch:
    """[1, sum of P_i + L_i]: all rows concatenated without padding, for attention that takes `cu_seqlens`.

    Arguments and errors as in `pad_batch`. Positions start again at 0 with each row.
    """
    flat, sizes = _flattened(prompts, tokens)
    ends = torch.tensor(sizes).cumsum(0)
    starts = ends - torch.tensor(sizes)
    positions = torch.arange(len(flat)) - starts.repeat_interleave(torch.tensor(sizes))
    lengths, rows, index = _target_places(prompts, tokens, starts=cast("Any", starts).tolist())
    return TokenBatch(
        tokens=flat[None],
        positions=positions.to(flat.device)[None],
        attention_mask=None,
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(device=flat.device, dtype=torch.int32),
        max_length=max(sizes),
        target_index=index,
        targets=torch.cat(list(tokens)),
        rows=rows,
        lengths=lengths,
        conditions=conditions or {},
    )


def to_rows(flat: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One number per target -> [n, L] with L the largest length, 0 where a row has ended; and which are real.

    flat: [T], T the sum of lengths, in the order of `TokenBatch.targets`.  lengths: n of them.
    Returns (padded [n, L], valid [n, L] bool). Differentiable; `from_rows` is the inverse.

    Raises ValueError when the lengths do not add up to T.
    """
    if flat.ndim != 1 or len(flat) != sum(lengths):
        raise ValueError(f"to_rows: got shape {list(flat.shape)}, expected [{sum(lengths)}], the sum of the lengths.")
    places = torch.arange(max(lengths, default=0), device=flat.device)
    valid = places < torch.tensor(lengths, device=flat.device, dtype=torch.int64)[:, None]
    return flat.new_zeros(valid.shape).masked_scatter(valid, flat), valid


def from_rows(padded: Tensor, valid: Tensor) -> Tensor:
    """[n, L] -> [T]: the real entries, row by row. Differentiable."""
    if padded.shape != valid.shape:
        raise ValueError(f"from_rows: padded is {list(padded.shape)}, valid {list(valid.shape)}; they must be equal.")
    return padded[valid]


def micro_batches_by_tokens(
    lengths: Sequence[int], budget: int, *, units: Sequence[Sequence[int]] | None = None, padded: bool = False
) -> list[list[int]]:
    """Row indices of each micro-batch, with at most `budget` tokens each, except for a single larger unit.

    lengths: tokens of each row, prompt included, as the model reads them.
    units: rows that stay together, of which each is in one; None partitions all rows, each on its own.
    padded: count a micro-batch as rows times its longest row, as `pad_batch` makes it; else as the sum, `pack_batch`.
    First-fit decreasing (for sums at most 11/9 of the fewest possible, plus 6/9: Dosa, 2007). Every unit is in exactly
    one. Rows are in order within a micro-batch, micro-batches in the order of their first row. Deterministic.

    Raises ValueError for a budget below 1 or a negative length.
    """
    if budget < 1:
        raise ValueError(f"micro_batches_by_tokens: got a budget of {budget} tokens, expected 1 or more.")
    check_costs("micro_batches_by_tokens: length", lengths)
    pieces = [[row] for row in range(len(lengths))] if units is None else units
    loads = [TokenLoad.of([lengths[row] for row in rows]) for rows in pieces]
    batches: list[list[int]] = []
    used: list[TokenLoad] = []
    for piece in sorted(range(len(pieces)), key=lambda piece: (-loads[piece].tokens(padded=padded), pieces[piece][0])):
        for number, batch in enumerate(batches):
            after = used[number].plus(loads[piece])
            if after.tokens(padded=padded) <= budget:
                batch.extend(pieces[piece])
                used[number] = after
                break
        else:
            batches.append(list(pieces[piece]))
            used.append(loads[piece])
    return sorted(sorted(batch) for batch in batches)


@dataclass(frozen=True)
class TokenLoad:
    """Size of the rows of a micro-batch."""

    rows: int
    longest: int
    total: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TokenLoad:
        return cls(len(lengths), max(lengths), sum(lengths))

    def plus(self, other: TokenLoad) -> TokenLoad:
        return TokenLoad(self.rows + other.rows, max(self.longest, other.longest), self.total + other.total)

    def tokens(self, *, padded: bool) -> int:
        """Tokens that a forward reads, padding included if `padded`."""
        return self.rows * self.longest if padded else self.total


def _flattened(prompts: Sequence[Tensor], tokens: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """All rows after each other, the tokens of each behind its prompt; and the size of each."""
    if len(prompts) != len(tokens) or not prompts:
        raise ValueError(
            f"token batch: {len(prompts)} prompts and {len(tokens)} rows of tokens; one each, and one row or more, "
            "are needed."
        )
    for name, values in (("prompt", prompts), ("tokens", tokens)):
        for row, value in enumerate(values):
            if value.ndim != 1 or value.dtype != torch.int64:
                raise ValueError(
                    f"token batch: the {name} of row {row}: got {value.dtype} {list(value.shape)}, expected 1-D int64."
                )
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"token batch: the prompt of row {row} is empty, so nothing predicts its first token. Give it a start "
                "token."
            )
    sizes = [len(prompt) + len(generated) for prompt, generated in zip(prompts, tokens, strict=True)]
    return torch.cat([part for row in zip(prompts, tokens, strict=True) for part in row]), sizes


def _target_places(
    prompts: Sequence[Tensor], tokens: Sequence[Tensor], *, starts: Sequence[int]
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Lengths, row of each target, and the position that predicts it; starts: of each row in the flattened tokens."""
    lengths = tuple(len(generated) for generated in tokens)
    first = torch.tensor([start + len(prompt) - 1 for start, prompt in zip(starts, prompts, strict=True)])
    sizes = torch.tensor(lengths)
    rows = torch.arange(len(lengths)).repeat_interleave(sizes)
    within = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
    device = tokens[0].device
    return lengths, rows.to(device), (first[rows] + within).to(device)
