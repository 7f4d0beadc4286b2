"""What a reward does: it scores samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..types.array import Array

if TYPE_CHECKING:
    from ..types.data import MediaRef
    from ..types.track import Status

__all__ = ["Reward", "ScoreInput", "Scores"]


@dataclass(frozen=True, kw_only=True)
class ScoreInput:
    """Samples to score, all of one track. Rows of a group may stand anywhere."""

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]
    images: Array | None = None
    """[N, 3, H, W] fp32 in [0, 1]."""
    videos: Sequence[Array] | None = None
    """Each [F, 3, H, W] fp32 in [0, 1]."""
    texts: tuple[str, ...] | None = None
    media_refs: tuple[tuple[MediaRef, ...], ...] | None = None
    status: tuple[Status, ...] | None = None
    """What became of each sample; a text that the length limit cut off is `TRUNCATED`."""
    lengths: tuple[int, ...] | None = None
    """Generated tokens of each text."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a reward gives back, in the order of its input."""

    values: Array
    """[N] fp32, finite."""
    parts: Mapping[str, Array] = field(default_factory=lambda: dict[str, Array]())
    """Components for the logs: name -> [N]."""


class Reward(Protocol):
    """Scores samples. Build: `build(config, *, device) -> Reward`. A sample that cannot be scored raises."""

    def score(self, samples: ScoreInput) -> Scores: ...
    def close(self) -> None: ...
