"""PickScore of videos: the mean over frames at equal distances."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.media import Media, spread

from .config import VideoPickScoreConfig
from .dual_encoders import pickscore_of
from .reward import EncoderReward

__all__ = ["FrameMeanReward", "build_video_pickscore"]

_NAME = "video-pickscore"


def build_video_pickscore(config: VideoPickScoreConfig, *, device: Any) -> FrameMeanReward:
    return FrameMeanReward(pickscore_of(config, name=_NAME, device=device), num_frames=config.num_frames)


class FrameMeanReward:
    """An image reward of frames."""

    def __init__(self, frames: EncoderReward, *, num_frames: int) -> None:
        self.frames = frames
        self._num_frames = num_frames

    def score(self, samples: ScoreInput) -> Scores:
        """[N] fp32 mean score of `num_frames` frames of each video, the first and the last among them; of all frames
        where it has fewer, of the first for `num_frames=1`. Components alike; the gradient flows into those frames.

        Raises RewardFailed for no samples, media other than videos, a video without frames, and what the image reward
        refuses, which names the sample and the frame of those that it was given.
        """
        frames: list[Tensor] = []
        names: list[str] = []
        rows: list[int] = []
        for row, video in enumerate(samples.of("video", reward=_NAME).stored):
            if not len(video):
                raise RewardFailed(
                    f"reward.{_NAME}: sample {samples.sample_ids[row]!r} has no frames, expected 1 or more."
                )
            places = spread(self._num_frames, len(video))
            frames += [video[place] for place in places]
            names += [f"{samples.sample_ids[row]}, frame {place}" for place in places]
            rows += [row] * len(places)
        images = dataclasses.replace(
            samples.select(rows), sample_ids=tuple(names), media=Media(kind="image", values=tuple(frames))
        )
        scores = self.frames.score(images)
        counts = [rows.count(row) for row in range(samples.num_rows)]

        def means(values: Tensor) -> Tensor:
            return torch.stack([of_one.mean() for of_one in values.split(counts)])

        return Scores(values=means(scores.values), parts={name: means(part) for name, part in scores.parts.items()})

    def close(self) -> None:
        pass
