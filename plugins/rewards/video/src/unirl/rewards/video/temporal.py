"""Whether a video changes smoothly, without flicker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.roles import ScoreInput, Scores
from unirl.numerics.pixels import widened

from .config import TemporalConfig
from .video_input import videos_of

__all__ = ["TemporalReward", "build"]

_NAME = "temporal"


def build(config: TemporalConfig, *, device: Any) -> TemporalReward:
    return TemporalReward()


class TemporalReward:
    def score(self, samples: ScoreInput) -> Scores:
        """[N] mean of two components, 0 to 1; the gradient flows into the videos.

        With D = I(t+1) - 2 I(t) + I(t-1), which is 0 where a pixel changes evenly and 2 in absolute value at most:
            smoothness = 1 - rms(D) / 2            over all pixels, channels and times
            steadiness = 1 - rms(mean of D) / 2    over times, the mean over a frame: flicker of the whole picture
        The component `change` is rms(I(t+1) - I(t)). A still video scores 1: watch `change`, or reward motion too.

        Raises RewardFailed as `videos_of` for fewer than three frames.
        """
        videos, _ = videos_of(samples, reward=_NAME, least=3)
        rows = torch.stack([_of_video(widened(frames)) for frames in videos])
        smoothness, steadiness, change = rows.unbind(1)
        return Scores(
            values=(smoothness + steadiness) / 2,
            parts={"smoothness": smoothness, "steadiness": steadiness, "change": change},
        )

    def close(self) -> None:
        pass


def _of_video(frames: Tensor) -> Tensor:
    """[3] smoothness, steadiness, change."""
    steps = frames[1:] - frames[:-1]
    bends = steps[1:] - steps[:-1]
    return torch.stack([1 - rms(bends) / 2, 1 - rms(bends.mean(dim=(1, 2, 3))) / 2, rms(steps)])


def rms(values: Tensor) -> Tensor:
    """Root mean square. Its gradient is 0 where all are 0."""
    return torch.linalg.vector_norm(values) / values.numel() ** 0.5
