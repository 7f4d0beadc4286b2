"""The images of a batch, checked: every image reward starts here."""

from __future__ import annotations

from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput

_SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


def images_of(samples: ScoreInput, *, reward: str, size_px: tuple[int, int] | None = None) -> Tensor:
    """[N, 3, H, W] images in [0, 1].

    Raises RewardFailed when they are missing, have another size, or leave [0, 1]; NaN counts as leaving.
    The message names the first sample at fault.
    """
    images = samples.of("image", reward=reward).stacked
    if size_px is not None and images.shape[2:] != size_px:
        expected, result = (f"{height} x {width}" for height, width in (size_px, images.shape[2:]))
        raise RewardFailed(
            f"reward.{reward}: needs images of {expected} pixels, but got {result}; "
            f"set sampling.height={size_px[0]} and sampling.width={size_px[1]}."
        )
    if (row := _out_of_range(images)) is not None:
        raise _failed(images[row], samples, row, reward=reward)
    return images


def video_frames_of(samples: ScoreInput, *, reward: str) -> list[Tensor]:
    """[F, 3, H, W] frames of each video, checked as `images_of` checks images."""
    videos = samples.of("video", reward=reward).arrays
    for row, frames in enumerate(videos):
        if (number := _out_of_range(frames)) is not None:
            raise _failed(frames[number], samples, row, reward=reward, frame=number)
    return list(videos)


def _out_of_range(images: Tensor) -> int | None:
    """The first image with a pixel outside [0, 1], if there is one."""
    low, high = images.detach().aminmax(dim=-1)
    is_fit = ((low >= -_SLACK) & (high <= 1 + _SLACK)).flatten(1).all(dim=1)
    return None if bool(is_fit.all()) else int((~is_fit).nonzero()[0])


def _failed(image: Tensor, samples: ScoreInput, row: int, *, reward: str, frame: int | None = None) -> RewardFailed:
    name = samples.sample_ids[row] + ("" if frame is None else f", frame {frame}")
    result = "NaN" if bool(image.isnan().any()) else f"values up to {_furthest(image):.3g}"
    return RewardFailed(
        f"reward.{reward}: sample {name!r} (prompt {samples.inputs.prompts[row]!r}) has {result}; pixels must lie in "
        "[0, 1]."
    )


def _furthest(image: Tensor) -> float:
    """The value furthest from the middle of [0, 1]."""
    flat = image.detach().flatten()
    return float(flat[(flat - 0.5).abs().argmax()])
