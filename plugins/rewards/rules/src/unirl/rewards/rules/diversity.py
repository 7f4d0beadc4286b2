"""How different a sample is from the others of its prompt, by pixels or by words.

Watched at weight 0, it shows a policy that has one answer left; with a weight, it is a bonus for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool3d
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.numerics.group_distance import group_distance

from .config import DiversityConfig
from .image_input import images_of, video_frames_of

__all__ = ["DiversityReward", "build"]

_NAME = "diversity"
_SIZE, _FRAMES = 16, 8
"""Of the reduced images and videos: what is compared is where colours are, not grain."""


def build(config: DiversityConfig, *, device: Any) -> DiversityReward:
    return DiversityReward(to=config.to)


class DiversityReward:
    """Distances in [0, 1]. Of images and videos the root of the mean squared difference of pixels, after averaging over
    16 x 16 areas and, of videos, 8 spans of time. Of texts the share of their word pairs, in lower case, that only one
    of the two has (the Jaccard distance); of a text with one word, that word."""

    def __init__(self, *, to: str) -> None:
        self._to = to

    def score(self, samples: ScoreInput) -> Scores:
        """Raises RewardFailed for samples without media, for sounds, and for pixels outside [0, 1]."""
        kind = None if samples.media is None else samples.media.kind
        if kind == "text":
            pairs = [_word_pairs(text) for text in samples.of("text", reward=_NAME).texts]
            values = group_distance(samples.group_ids, lambda rows: _jaccard([pairs[row] for row in rows]), to=self._to)
            return Scores(values=values)
        if kind == "image":
            clips = [image[None] for image in images_of(samples, reward=_NAME)]
        elif kind == "video":
            clips = video_frames_of(samples, reward=_NAME)
        else:
            got = "samples without media" if kind is None else kind
            hint = " Set sampling.decode=true." if kind is None else ""
            raise RewardFailed(f"reward.{_NAME}: got {got}, expected image, video or text.{hint}")
        frames = 1 if kind == "image" else _FRAMES
        reduced = torch.stack([_reduced(clip, frames) for clip in clips])

        def distances(rows: Sequence[int]) -> Tensor:
            own = reduced[list(rows)]
            # By differences: by products, two equal samples would be apart by rounding.
            apart = torch.cdist(own, own, compute_mode="donot_use_mm_for_euclid_dist")
            return apart / own.shape[1] ** 0.5

        return Scores(values=group_distance(samples.group_ids, distances, to=self._to))

    def close(self) -> None:
        """Nothing is held."""


def _reduced(clip: Tensor, frames: int) -> Tensor:
    """[F, 3, H, W] -> [frames x 3 x 16 x 16] fp32 on the CPU."""
    clip = clip.detach().float().transpose(0, 1)
    return adaptive_avg_pool3d(clip[None], (frames, _SIZE, _SIZE)).flatten().cpu()


def _word_pairs(text: str) -> frozenset[tuple[str, ...]]:
    words = text.lower().split()
    return frozenset(pairwise(words)) or frozenset((word,) for word in words)


def _jaccard(sets: Sequence[frozenset[tuple[str, ...]]]) -> Tensor:
    return torch.tensor([[1 - len(a & b) / len(a | b) if a | b else 0.0 for b in sets] for a in sets])
