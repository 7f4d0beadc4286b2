"""Texts that a stage does not go on from: truncated, aborted or empty ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unirl.core.errors import RunFailed
from unirl.core.types.track import Status

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage
    from unirl.core.types.track import Track

__all__ = ["check_finished", "is_unfinished", "left_out", "rows_to_continue"]


def is_unfinished(track: Track, row: int) -> bool:
    """Whether a sample is a text that was truncated, aborted, or is empty."""
    if track.media is None or track.media.kind != "text":
        return False
    return track.status[row] in (Status.TRUNCATED, Status.ABORTED) or not track.media.texts[row].strip()


def rows_to_continue(parent: Track, stage: Stage) -> list[int]:
    """The rows of its parent that a stage goes on from. Raises RunFailed for an unfinished one where it is to fail."""
    rows = [row for row in range(parent.num_rows) if not is_unfinished(parent, row)]
    if stage.settings.unfinished == "continue" or len(rows) == parent.num_rows:
        return list(range(parent.num_rows))
    if stage.settings.unfinished == "fail":
        raise RunFailed(f"{_told(parent, stage)} Or set stages.{stage.name}.unfinished=leave-out.")
    return rows


def check_finished(tracks: Mapping[str, Track], plan: Plan) -> None:
    """Raise RunFailed for a stage that left out every sample of its parent."""
    for stage in plan.stages:
        if stage.parent is not None and not rows_to_continue(tracks[stage.parent], stage):
            raise RunFailed(_told(tracks[stage.parent], stage))


def left_out(tracks: Mapping[str, Track], plan: Plan) -> dict[str, float]:
    """Metrics: the share of the texts above each stage that it leaves out."""
    metrics: dict[str, float] = {}
    for stage in plan.stages:
        if stage.parent is not None and stage.settings.unfinished == "leave-out":
            parent = tracks[stage.parent]
            share = 1 - len(rows_to_continue(parent, stage)) / parent.num_rows
            metrics[f"{plan.prefix(stage)}left_out"] = share
    return metrics


def _told(parent: Track, stage: Stage) -> str:
    rows = [row for row in range(parent.num_rows) if is_unfinished(parent, row)]
    cut = sum(parent.status[row] is Status.TRUNCATED for row in rows)
    return (
        f"stages.{stage.name}.unfinished: {len(rows)} of {parent.num_rows} texts of stage {parent.name!r} are "
        f"unfinished ({cut} truncated, {len(rows) - cut} aborted or empty). Raise "
        f"sampling.{parent.name}.max_new_tokens, or look at the texts."
    )
