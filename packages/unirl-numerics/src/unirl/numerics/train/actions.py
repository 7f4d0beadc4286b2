"""Numbers of the actions of a track, in one shape for both kinds: tokens of a text, scored steps of a trajectory."""

from __future__ import annotations

import dataclasses
from typing import cast

from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.types.track import LatentSegment, TextSegment, Track

from ..tokens.replay import per_sample, per_token, token_mask

__all__ = ["action_mask", "per_action", "with_per_action"]


def action_mask(track: Track) -> Tensor:
    """[n, S] bool: the actions that are trained on, S the most of any row."""
    if isinstance(track.segment, TextSegment):
        return token_mask(track.segment)
    return track.latent.scored_steps >= 0


def per_action(track: Track, name: str) -> Tensor:
    """A field of the segment with one number per action, as [n, S]; arbitrary where `action_mask` is False.

    Raises BatchError if no earlier phase has filled it in.
    """
    if isinstance(track.segment, TextSegment):
        return per_token(track.segment, name)
    values = cast("Tensor | None", getattr(track.latent, name))
    if values is None:
        raise BatchError(f"LatentSegment.{name}: it is needed, but no earlier phase has filled it in.")
    return values


def with_per_action(track: Track, **fields: Tensor) -> Track:
    """The inverse: the track with these fields of its segment, each [n, S]."""
    segment = track.segment
    if isinstance(segment, LatentSegment):
        return dataclasses.replace(track, segment=dataclasses.replace(segment, **fields))
    text = track.text
    rows = {name: per_sample(values, text) for name, values in fields.items()}
    return dataclasses.replace(track, segment=dataclasses.replace(text, **rows))
