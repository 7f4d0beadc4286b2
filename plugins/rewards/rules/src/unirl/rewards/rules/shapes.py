"""Reward of the world of shapes: is it the right colour, the right shape, at the right place?"""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.roles import ScoreInput, Scores

from .config import ShapesConfig
from .image_input import images_of
from .metadata_input import indices_of
from .shapes_reading import read_shapes
from .shapes_world import COLORS, PLACES, SHAPES, SIZE_PX

__all__ = ["ShapesReward", "build"]

_NAME = "shapes"


def build(config: ShapesConfig, *, device: Any) -> ShapesReward:
    return ShapesReward()


class ShapesReward:
    """Reads each image by rule; see `shapes_reading` for the thresholds."""

    def score(self, samples: ScoreInput) -> Scores:
        """Share of right parts, and each part. `perfect` is 1 when all three are right."""
        images = images_of(samples, reward=_NAME, size_px=(SIZE_PX, SIZE_PX))
        seen = read_shapes(images)
        answers = {
            "color": (seen.color, tuple(COLORS)),
            "shape": (seen.shape, SHAPES),
            "place": (seen.place, tuple(PLACES)),
        }
        parts = {
            key: (result == torch.tensor(indices_of(samples, key, known, reward=_NAME)).to(result)).float()
            for key, (result, known) in answers.items()
        }
        right = torch.stack(list(parts.values())).sum(dim=0)
        return Scores(values=right / 3, parts={**parts, "perfect": (right == 3).float()})

    def close(self) -> None:
        pass
