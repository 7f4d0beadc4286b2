"""Rewards: they score samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import RewardFailed
from ..types.array import Array
from ..types.batch import Batch, rows

if TYPE_CHECKING:
    from ..types.inputs import Inputs
    from ..types.media import Media, MediaKind
    from ..types.track import Status, Track

__all__ = ["GradientScore", "Reward", "ScoreInput", "Scores"]


@dataclass(frozen=True, kw_only=True)
class ScoreInput(Batch):
    """Samples to score, all of one track. Rows of a group may be anywhere."""

    sample_ids: tuple[str, ...] = rows()
    group_ids: tuple[str, ...] = rows()
    inputs: Inputs = rows()
    """Inputs of the samples, prompts included."""
    metadata: tuple[Mapping[str, Any], ...] = rows()
    media: Media | None = rows(default=None)
    """Media to score; None where the samples were not decoded. Pixels of a rollout have 8 bits: `arrays` and `stacked`
    give them as numbers in [0, 1], `stored` as they are. In a loss they are floating, with their gradient."""
    status: tuple[Status, ...] | None = rows(default=None)
    """Finish reason of each sample; a completion cut off by the length limit is `TRUNCATED`."""
    lengths: tuple[int, ...] | None = rows(default=None)
    """Sampled tokens of each text; of an episode those of all its answers."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    def of(self, kind: MediaKind, *, reward: str) -> Media:
        """The media. Raises RewardFailed, in the name of this reward, where there are none or they are of another
        kind."""
        if self.media is None or self.media.kind != kind:
            result = "samples without media" if self.media is None else self.media.kind
            hint = " Set sampling.decode=true." if self.media is None and kind != "text" else ""
            raise RewardFailed(f"reward.{reward}: got {result}, expected {kind}.{hint}")
        return self.media


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Result of a reward, in the order of its input."""

    values: Array
    """[N] fp32, finite. With the gradient of the media where the spec states `reward-differentiable`."""
    parts: Mapping[str, Array] = field(default_factory=lambda: dict[str, Array]())
    """Components for the logs: name -> [N]."""
    scored: Array | None = None
    """[N] bool; False for a sample without a score, such as one whose judge gave an answer that cannot be parsed. Its
    value and components are not read; it is not trained on, left out of means, and counted as `unscored`. None is all
    True. A reward that cannot work at all raises instead."""


class Reward(Protocol):
    """Scores samples. Build: `build(config, *, device) -> Reward`. A sample that cannot be scored raises."""

    def score(self, samples: ScoreInput) -> Scores: ...
    def close(self) -> None: ...


class GradientScore(Protocol):
    """The score of media that a loss makes of a track's samples: the weighted sum of the stage's rewards."""

    def __call__(self, track: Track, media: Array) -> Array:
        """[n] fp32, with the gradient of the media, on their device; 0 without one for rows of weight 0.

        media: one entry per row of the track, as `Forward.decode` gives them.
        Raises RewardFailed as scoring a rollout does, and for a score that does not depend on the media.
        """
        ...
