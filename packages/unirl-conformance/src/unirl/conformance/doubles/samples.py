"""Tracks as trackers get them: samples with their prompts and rewards, and nothing to train on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status, Track

__all__ = ["make_samples"]


def make_samples(
    media: Media,
    prompts: Sequence[str],
    rewards: Sequence[float] | None = None,
    *,
    truncated: Collection[int] = (),
    name: str = "trial",
    parent: Track | None = None,
) -> Track:
    """media, prompts, rewards: N each.  truncated: rows that a length limit ended.  name: of the track.
    parent: M samples of it, N a multiple of M; each has N / M children, and their texts are what the children are made
    from."""
    rows = len(prompts)
    parents = [row * parent.num_rows // rows for row in range(rows)] if parent is not None else []
    ids = tuple(parent.sample_ids[row] for row in parents) if parent is not None else None
    given = tuple(parent.media.texts[row] for row in parents) if parent is not None and parent.media else tuple(prompts)
    return Track(
        name=name,
        sample_ids=tuple(f"{name}-{row}" for row in range(rows)),
        group_ids=tuple(prompts),
        parent_track=None if parent is None else parent.name,
        parent_ids=ids,
        inputs=Inputs(
            ids=ids or tuple(f"prompt-{row}" for row in range(rows)),
            prompts=tuple(prompts),
            texts=given,
            media=((),) * rows,
        ),
        metadata=({},) * rows,
        media=media,
        rewards=None if rewards is None else torch.tensor(list(rewards), dtype=torch.float32),
        sample_weights=torch.ones(rows),
        status=tuple(Status.TRUNCATED if row in truncated else Status.COMPLETED for row in range(rows)),
        policy_version=(0,) * rows,
    )
