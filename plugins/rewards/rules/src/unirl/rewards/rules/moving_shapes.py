"""Reward of the world of shapes in motion: is it the right colour, the right shape, and does it move the right way?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores

from .clips_reading import read_clip
from .clips_world import MOTIONS, SIZE_PX
from .config import MovingShapesConfig
from .image_input import video_frames_of
from .metadata_input import indices_of
from .shapes_world import COLORS, SHAPES

__all__ = ["MovingShapesReward", "build"]

_NAME = "moving-shapes"


def build(config: MovingShapesConfig, *, device: Any) -> MovingShapesReward:
    return MovingShapesReward()


class MovingShapesReward:
    """Reads each frame by rule; see `clips_reading` for the thresholds."""

    def score(self, samples: ScoreInput) -> Scores:
        """Mean of three shares, and each of them: frames of the right colour, frames of the right shape, and steps from
        one frame to the next in the right direction. `perfect` is 1 when all three are 1.

        Raises RewardFailed, naming the sample, for metadata of other words, one frame, and frames of another size.
        """
        videos = video_frames_of(samples, reward=_NAME)
        answers = {
            key: indices_of(samples, key, known, reward=_NAME)
            for key, known in (("color", tuple(COLORS)), ("shape", SHAPES), ("motion", tuple(MOTIONS)))
        }
        rows: list[Tensor] = []
        for row, frames in enumerate(videos):
            _check_size(samples, row, frames)
            seen = read_clip(frames)
            rows.append(torch.stack([(getattr(seen, key) == answers[key][row]).float().mean() for key in answers]))
        shares = torch.stack(rows) if rows else torch.zeros(0, len(answers))
        parts = dict(zip(answers, shares.unbind(dim=1), strict=True))
        return Scores(values=shares.mean(dim=1), parts={**parts, "perfect": (shares == 1).all(dim=1).float()})

    def close(self) -> None:
        pass


def _check_size(samples: ScoreInput, row: int, frames: Tensor) -> None:
    count, _, height, width = frames.shape
    if (height, width) != (SIZE_PX, SIZE_PX) or count < 2:
        raise RewardFailed(
            f"reward.{_NAME}: got {count} frames of {height} x {width} pixels in sample {samples.sample_ids[row]!r}, "
            f"expected 2 or more of {SIZE_PX} x {SIZE_PX}; set sampling.frames, sampling.height and sampling.width."
        )
