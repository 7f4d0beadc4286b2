"""Tracks of given completions."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, TextSegment, Track

__all__ = ["one_group"]


def one_group(segment: TextSegment, **columns: Any) -> Track:
    """Completed samples of one prompt, each of weight 1, unless the columns say otherwise."""
    rows = len(segment.tokens)
    usual: dict[str, Any] = {
        "name": "text",
        "sample_ids": tuple(f"p/{row}" for row in range(rows)),
        "group_ids": ("p",) * rows,
        "inputs": Inputs.of_texts(("p",) * rows),
        "metadata": ({},) * rows,
        "sample_weights": torch.ones(rows),
        "status": (Status.COMPLETED,) * rows,
        "policy_version": (0,) * rows,
    }
    return Track(segment=segment, **{**usual, **columns})
