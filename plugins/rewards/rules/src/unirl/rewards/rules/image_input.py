"""The images of a batch, checked: every image reward starts here."""

from __future__ import annotations

from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput

_SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


def images_of(samples: ScoreInput, *, reward: str, size_px: tuple[int, int] | None = None) -> Tensor:
    """[N, 3, H, W] images in [0, 1].

    Raises RewardFailed when they are missing, have another shape or size, or leave [0, 1]; NaN counts as leaving.
    The message names the first sample at fault.
    """
    images = samples.images
    if images is None:
        raise RewardFailed(f"reward.{reward}: needs images, but the track has none; set sampling.decode=true.")
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != 3:
        raise RewardFailed(f"reward.{reward}: needs images of shape [N, 3, H, W], but got {list(shape)}.")
    if shape[0] != len(samples.sample_ids):
        raise RewardFailed(f"reward.{reward}: got {shape[0]} images for {len(samples.sample_ids)} samples.")
    if size_px is not None and shape[2:] != size_px:
        expected, result = (f"{height} x {width}" for height, width in (size_px, shape[2:]))
        raise RewardFailed(
            f"reward.{reward}: needs images of {expected} pixels, but got {result}; "
            f"set sampling.height={size_px[0]} and sampling.width={size_px[1]}."
        )
    low, high = images.detach().aminmax(dim=-1)
    is_fit = ((low >= -_SLACK) & (high <= 1 + _SLACK)).flatten(1).all(dim=1)
    if not bool(is_fit.all()):
        row = int((~is_fit).nonzero()[0])
        result = "NaN" if bool(images[row].isnan().any()) else f"values up to {_furthest(images[row]):.3g}"
        raise RewardFailed(
            f"reward.{reward}: sample {samples.sample_ids[row]!r} (prompt {samples.prompts[row]!r}) has {result}; "
            "pixels must lie in [0, 1]."
        )
    return images


def video_frames_of(samples: ScoreInput, *, reward: str) -> list[Tensor]:
    """[F, 3, H, W] frames of each video, checked as `images_of` checks images."""
    assert samples.videos is not None
    checked: list[Tensor] = []
    for row, frames in enumerate(samples.videos):
        name, prompt = samples.sample_ids[row], samples.prompts[row]
        as_images = ScoreInput(
            sample_ids=tuple(f"{name}, frame {number}" for number in range(len(frames))),
            group_ids=(samples.group_ids[row],) * len(frames),
            prompts=(prompt,) * len(frames),
            metadata=(samples.metadata[row],) * len(frames),
            images=frames,
        )
        checked.append(images_of(as_images, reward=reward))
    return checked


def _furthest(image: Tensor) -> float:
    """The value furthest from the middle of [0, 1]."""
    flat = image.detach().flatten()
    return float(flat[(flat - 0.5).abs().argmax()])
