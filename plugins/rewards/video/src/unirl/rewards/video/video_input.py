"""The videos of a batch, checked: every reward of this plugin starts here."""

from __future__ import annotations

from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput
from unirl.numerics.pixels import check_range

__all__ = ["videos_of"]


def videos_of(samples: ScoreInput, *, reward: str, least: int) -> tuple[tuple[Tensor, ...], float]:
    """[F, 3, H, W] of each sample, in [0, 1] or levels of 8 bits (`widened` reads both), and their frames per second.

    least: frames that the reward needs. Raises RewardFailed, naming the sample, for no samples, media other than
    videos, fewer frames, and pixels outside [0, 1]; NaN counts as outside.
    """
    media = samples.of("video", reward=reward)
    if not media.num_rows:
        raise RewardFailed(f"reward.{reward}: got no samples, expected 1 or more.")
    assert media.rate is not None, "Media refuses videos without a rate"
    for row, frames in enumerate(media.stored):
        if len(frames) < least:
            raise RewardFailed(
                f"reward.{reward}: got {len(frames)} frames in sample {samples.sample_ids[row]!r}, expected {least} or "
                "more. Set sampling.frames."
            )
        check_range(frames, samples, row, reward=reward)
    return media.stored, media.rate
