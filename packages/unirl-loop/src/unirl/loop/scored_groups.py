"""The groups of a step with their rewards, as the queue returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from unirl.core.types.rollout import Rollout
from unirl.core.types.track import Track

from .dynamic_sampling import Drawn

__all__ = ["ScoredGroups"]


@dataclass(frozen=True, kw_only=True)
class ScoredGroups(Rollout):
    """The groups of a step with their rewards and credit from child stages, and how long they took."""

    generate_s: float
    """Seconds in which the engine was generating."""
    score_s: float
    """Seconds in which the busiest reward was scoring; of all of them where they score one after the other."""
    latencies_s: tuple[float, ...]
    """Seconds from the end of each piece's generation to the last of its scores."""
    most_unscored: int
    """Most pieces that were generated and not scored."""
    drawn: Drawn | None = None
    """How the groups were chosen by dynamic sampling."""
    scouts: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """Sample id -> reward of its scout, for all scouts of the step that have one."""

    @classmethod
    def of_rounds(cls, rounds: Sequence[Self], *, tracks: Mapping[str, Track], drawn: Drawn) -> Self:
        """Groups that were chosen from several rounds of dynamic sampling."""
        return cls(
            tracks=tracks,
            generate_s=sum(each.generate_s for each in rounds),
            score_s=sum(each.score_s for each in rounds),
            latencies_s=tuple(seconds for each in rounds for seconds in each.latencies_s),
            most_unscored=max(each.most_unscored for each in rounds),
            drawn=drawn,
            scouts={sample: reward for each in rounds for sample, reward in each.scouts.items()},
        )

    def after(self, generate_s: float, score_s: float) -> Self:
        """The groups with the seconds of others that were drawn for them."""
        return replace(self, generate_s=self.generate_s + generate_s, score_s=self.score_s + score_s)
