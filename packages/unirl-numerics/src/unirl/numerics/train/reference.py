"""Outputs of the reference policy, stored with the track for processes that do not hold that policy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.track import TextSegment

from ..tokens.replay import per_sample, per_token, token_mask

if TYPE_CHECKING:
    from unirl.core.roles import Forward, Policy
    from unirl.core.types.track import Track

__all__ = ["kept_reference_tokens", "with_reference"]


def with_reference(track: Track, forward: Forward, *, policy: Policy = "reference") -> Track:
    """The track with the means of its SDE steps, or the log-probs of its tokens, under `policy`. No gradient."""
    with torch.no_grad():
        result = forward(track, policy=policy)
    if isinstance(track.segment, TextSegment):
        segment = dataclasses.replace(track.segment, reference_log_probs=per_sample(result.log_probs, track.segment))
        return dataclasses.replace(track, segment=segment)
    assert isinstance(result, Replayed)
    return dataclasses.replace(track, segment=dataclasses.replace(track.latent, reference_means=result.means))


def kept_reference_tokens(segment: TextSegment) -> ReplayedTokens | None:
    """The log-probs stored by `with_reference`, in the form of a replay; None if there are none."""
    if segment.reference_log_probs is None:
        return None
    valid = token_mask(segment)
    log_probs = torch.where(valid, per_token(segment, "reference_log_probs"), 0.0)
    return ReplayedTokens(log_probs=log_probs, entropy=None, valid=valid)
