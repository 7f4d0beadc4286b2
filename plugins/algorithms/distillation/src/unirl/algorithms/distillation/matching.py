"""What losses that match a teacher at points of a sample share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from unirl.core.roles import Algorithm
from unirl.core.types.track import Track
from unirl.numerics.forward_process import PointLosses

__all__ = ["Matching"]


class Matching(PointLosses, Algorithm):
    """Base of losses without rewards: every sample counts alike, at each of its points."""

    def __init__(self, *, num_points: int, seed: int) -> None:
        """seed: of the run, for points and noise."""
        self.num_points, self._seed = num_points, seed

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is."""
        return track, {}

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"matching": self.point_weights(track)}
