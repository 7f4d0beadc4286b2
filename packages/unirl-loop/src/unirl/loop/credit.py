"""Credit: rewards that samples of a parent stage get from those of their children."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from unirl.core.errors import BatchError

from .unfinished import is_unfinished

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage
    from unirl.core.types.array import Array
    from unirl.core.types.track import Track

__all__ = ["credited"]


def credited(tracks: Mapping[str, Track], stages: Sequence[Stage]) -> dict[str, Track]:
    """The tracks with credit in their rewards, children first, so that it reaches the roots.

    A parent's `reward_parts` get the credit under the child's name, and its `rewards` the sum: several children add up.
    Samples of weight 0 give none, a parent sample of which no sample counts gets NaN and weight 0, or the stage's
    `unfinished_credit` if it is unfinished, and with `best` the other samples of its child get weight 0.
    stages: parents first. Raises BatchError for a child without rewards.
    """
    result = dict(tracks)
    for stage in reversed(stages):
        if stage.parent is not None and stage.settings.credit != "none":
            parent, child = result[stage.parent], result[stage.name]
            result[stage.parent], result[stage.name] = _credited(
                parent, child, how=stage.settings.credit, unfinished=stage.settings.unfinished_credit
            )
    return result


def _credited(parent: Track, child: Track, *, how: str, unfinished: float | None) -> tuple[Track, Track]:
    import torch

    if (rewards := child.rewards) is None:
        raise BatchError(f"track {child.name!r} gives credit and has no rewards.")
    rows: dict[str, list[int]] = {name: [] for name in parent.sample_ids}
    for row, name in enumerate(cast("tuple[str, ...]", child.parent_ids)):
        if float(child.sample_weights[row]) > 0:
            rows[name].append(row)
    credit = torch.full((parent.num_rows,), float("nan"))
    counted = torch.ones(parent.num_rows)
    best: list[int] = []
    for number, name in enumerate(parent.sample_ids):
        if not rows[name]:
            if unfinished is not None and is_unfinished(parent, number):
                credit[number] = unfinished
            else:
                counted[number] = 0.0
            continue
        values = rewards[rows[name]].float().cpu()
        # By id where rewards are equal: the order of the rows must not matter.
        best.append(max(rows[name], key=lambda row: (float(rewards[row]), child.sample_ids[row])))
        credit[number] = _one(values, how)
    total = credit if parent.rewards is None else parent.rewards + credit.to(parent.rewards.device)
    parent = dataclasses.replace(
        parent,
        rewards=total,
        reward_parts={**parent.reward_parts, child.name: credit},
        sample_weights=parent.sample_weights * counted.to(parent.sample_weights.device),
    )
    if how == "best":
        chosen = child.sample_weights * 0
        chosen[best] = child.sample_weights[best]
        child = dataclasses.replace(child, sample_weights=chosen)
    return parent, child


def _one(values: Array, how: str) -> Array:
    """The credit of the samples of one parent sample."""
    if how == "mean":
        return values.mean()
    return values.sum() if how == "sum" else values.max()
