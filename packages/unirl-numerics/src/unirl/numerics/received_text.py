"""A text track of a request, from tokens that an engine in another process generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.request import Request
from unirl.core.track import Track

from .text_rollout import GeneratedText, text_track, visible_texts

if TYPE_CHECKING:
    from unirl.core.roles import TextModel

__all__ = ["received_track"]


def received_track(
    request: Request,
    name: str,
    *,
    model: TextModel,
    tokens: Sequence[Tensor],
    log_probs: Sequence[Tensor] | None,
    truncated: Sequence[bool],
    version: int,
) -> Track:
    """The track of a whole request, see `text_track`.

    tokens: per row [L_n] int64.  log_probs: per row [L_n] fp32 under softmax(logits / temperature) of all tokens; None
    where the engine cannot say them.
    """
    # A text that is made without log-probs has none to count; they are taken out again below.
    counted = [torch.zeros(len(row)) for row in tokens] if log_probs is None else log_probs
    generated = GeneratedText(tokens=tuple(tokens), log_probs=tuple(counted), truncated=tuple(truncated))
    texts = visible_texts(model, generated.tokens, request.text(name).sampling)
    track = text_track(request, name, generated=generated, texts=texts, version=version)
    if log_probs is None:
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=None))
    return track
