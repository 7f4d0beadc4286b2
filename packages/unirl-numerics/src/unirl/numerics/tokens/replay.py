"""Replay of a text track: the log-probs of its tokens under the current weights, with gradient."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import ReplayedTokens, TokenBatch

from .batches import pack_batch, pad_batch, to_rows
from .restricted import target_restrictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from unirl.core.roles import DivergenceKind, OutputHead, TextModel
    from unirl.core.types.track import TextSegment, Track

__all__ = [
    "per_sample",
    "per_token",
    "replay_divergence",
    "replay_output_head",
    "replay_text",
    "replay_values",
    "token_mask",
]


def replay_text(model: TextModel, track: Track, *, packing: bool, with_entropy: bool = True) -> ReplayedTokens:
    """Recompute the log-probs of a text track's tokens.

    packing: concatenate rows without padding, if the model supports it; results agree to fp32 rounding.
    Raises BatchError for a track that was sampled greedily.
    """
    segment = track.text
    temperature = _temperature(segment)
    batch = _batch(model, track, packing=packing)
    flat, entropy = model.score(batch, temperature=temperature, with_entropy=with_entropy)
    log_probs, _ = to_rows(flat, segment.lengths)
    valid = token_mask(segment)
    zero = torch.zeros_like(log_probs)
    return ReplayedTokens(
        log_probs=torch.where(valid, log_probs, zero),
        entropy=None if entropy is None else torch.where(valid, to_rows(entropy, segment.lengths)[0], zero),
        valid=valid,
    )


def replay_output_head(model: TextModel, track: Track, *, packing: bool) -> OutputHead:
    """Parts of a model's distributions at every token of the track, for `replay_divergence`."""
    return model.output_head(_batch(model, track, packing=packing))


def replay_divergence(
    model: TextModel,
    track: Track,
    *,
    teacher: OutputHead,
    kind: DivergenceKind,
    beta: float,
    top_k: int | None,
    packing: bool,
) -> ReplayedTokens:
    """See `unirl.core.roles.Forward.divergence`.  teacher: `replay_output_head` of the same track."""
    segment, batch = track.text, _batch(model, track, packing=packing)
    result = model.divergence(
        batch, teacher=teacher, kind=kind, beta=beta, top_k=top_k, temperature=_temperature(segment)
    )
    valid = token_mask(segment)
    divergence, log_probs = (torch.where(valid, to_rows(flat, segment.lengths)[0], 0.0) for flat in result)
    return ReplayedTokens(log_probs=log_probs, entropy=None, valid=valid, divergence=divergence)


def replay_values(critic: Callable[[TokenBatch], Tensor], model: TextModel, track: Track, *, packing: bool) -> Tensor:
    """[n, S] fp32: the critic's value before each token of a text track; 0 where not valid.

    critic: returns [T] for the targets of a batch, differentiable outside no_grad.  model: decides their layout.
    """
    segment = track.text
    flat = critic(_batch(model, track, packing=packing)).float()
    values, _ = to_rows(flat, segment.lengths)
    return torch.where(token_mask(segment), values, torch.zeros_like(values))


def _temperature(segment: TextSegment) -> float:
    if segment.temperature <= 0:
        raise BatchError(
            f"Track: its text was sampled at temperature {segment.temperature}, greedily, so its tokens have no "
            "log-probs to train on. Sample with a temperature above 0."
        )
    return segment.temperature


def _batch(model: TextModel, track: Track, *, packing: bool) -> TokenBatch:
    prompts, tokens = track.text.prompt_tokens, track.text.tokens
    conditions = track.conditions["positive"].expanded() if "positive" in track.conditions else None
    if packing and model.packs:
        batch = pack_batch(prompts, tokens, conditions=conditions)
    else:
        batch = pad_batch(prompts, tokens, pad_token=model.pad_token, conditions=conditions)
    options = dict(track.text.options)
    return dataclasses.replace(batch, options=options, allowed=target_restrictions(model, tokens, options=options))


def token_mask(segment: TextSegment) -> Tensor:
    """[n, S] bool: trained tokens, with S the longest completion."""
    if segment.mask is not None or not segment.tokens:
        return _padded(segment.mask or ())
    lengths, device = segment.lengths, segment.tokens[0].device
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def per_token(segment: TextSegment, name: str) -> Tensor:
    """A per-token field of the segment as [n, S]; 0 past the end of a completion.

    Raises BatchError if no earlier phase has filled it in.
    """
    values: tuple[Tensor, ...] | None = getattr(segment, name)
    if values is None:
        raise BatchError(f"TextSegment.{name}: it is needed, but no earlier phase has filled it in.")
    return _padded(values)


def per_sample(values: Tensor, segment: TextSegment) -> tuple[Tensor, ...]:
    """The inverse of `per_token`: [n, S] -> per sample [L_n], without the padding."""
    return tuple(row[:length].clone() for row, length in zip(values, segment.lengths, strict=True))


def _padded(values: Sequence[Tensor]) -> Tensor:
    if not values:
        raise BatchError("TextSegment: it has no rows.")
    return to_rows(torch.cat([*values]), [len(row) for row in values])[0]
