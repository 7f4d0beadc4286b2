"""Samples as plain data, for trackers: tables of texts, and pixels as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from unirl.core.types.track import Status

if TYPE_CHECKING:
    from unirl.core.types.array import Array
    from unirl.core.types.media import Media
    from unirl.core.types.track import Track

__all__ = ["Shown", "pixels", "sample_table"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Samples as plain data: texts and NumPy arrays."""

    key: str
    """`train` or `eval`, and with several stages `train/<stage>`."""
    step: int
    kind: Literal["text", "image", "video"]
    media: Sequence[Any]
    """A text, an image as uint8 [H, W, 3], or a video as uint8 [F, H, W, 3] for each sample."""
    captions: Sequence[str]
    """Prompt, reward and truncation of each in one line."""
    columns: Sequence[str]
    """prompt, parents that are texts from the root down, for texts the text, reward, truncated."""
    rows: Sequence[Sequence[Any]]
    """Values of these columns for each sample."""
    rate: float | None = None
    """Frames a second of videos."""


def sample_table(
    track: Track, media: Mapping[str, Media], *, cell: Callable[[Media, int], Any]
) -> tuple[list[str], list[list[Any]]]:
    """Columns and a row for each sample: prompt, a `cell` for each of `media`, reward, and whether a length limit ended
    it."""
    rows: list[list[Any]] = []
    for row, prompt in enumerate(track.inputs.prompts):
        reward = None if track.rewards is None else float(track.rewards[row])
        cells = [cell(each, row) for each in media.values()]
        rows.append([prompt, *cells, reward, track.status[row] is Status.TRUNCATED])
    return ["prompt", *media, "reward", "truncated"], rows


def pixels(images: Array) -> Array:
    """uint8 [..., H, W, 3] on the CPU of [..., 3, H, W] in [0, 1]."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).contiguous().cpu()
