"""Numbers of a track by SDE step or by token, in one shape for both kinds of track."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from unirl.core.types.track import PER_TOKEN, Track
from unirl.numerics.train.actions import per_action, with_per_action

__all__ = ["advantages_of", "changed_per_token", "log_probs_of", "with_advantages", "with_mask"]


def log_probs_of(track: Track) -> Tensor | None:
    """[n, S] log-probs of the SDE steps or of the tokens that a track carries, 0 past the end of a text."""
    assert track.segment is not None
    return None if track.segment.log_probs is None else per_action(track, "log_probs")


def advantages_of(track: Track) -> Tensor:
    """[n, S] of the tokens or steps of a track that has them, 0 past the end of a text; else [n, 1] of the samples."""
    if track.segment is not None and track.segment.advantages is not None:
        return per_action(track, "advantages")
    assert track.advantages is not None, "neither the samples nor their tokens have advantages"
    return track.advantages[:, None]


def with_advantages(track: Track, advantages: Tensor) -> Track:
    """The same track with these advantages, of the shape that `advantages_of` gives."""
    if track.segment is not None and track.segment.advantages is not None:
        return with_per_action(track, advantages=advantages)
    return dataclasses.replace(track, advantages=advantages.squeeze(1))


def with_mask(track: Track, masks: Sequence[Tensor]) -> Track:
    """The same text track, of which the tokens where a mask [L_n] is False are not trained on."""
    return dataclasses.replace(track, segment=dataclasses.replace(track.text, mask=tuple(masks)))


def changed_per_token(track: Track, change: Callable[[int, Tensor], Tensor], *, is_filled: bool = True) -> Track:
    """The same text track with other numbers of its tokens: `change` is given each row with its values [L_n].

    is_filled: leave fields that nothing has filled in as they are; else they are given zeros.
    """
    segment, changes = track.text, dict[str, tuple[Tensor, ...]]()
    for name in PER_TOKEN:
        values = cast("tuple[Tensor, ...] | None", getattr(segment, name))
        if name == "mask" or (values is None and is_filled):
            continue
        rows = values or tuple(torch.zeros(length) for length in segment.lengths)
        changes[name] = tuple(change(row, value) for row, value in enumerate(rows))
    return dataclasses.replace(track, segment=dataclasses.replace(segment, **changes))
