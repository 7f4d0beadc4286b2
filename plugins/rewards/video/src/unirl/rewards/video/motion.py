"""Whether a video moves as its metadata says: a direction, a velocity, or not at all.

Source of the estimators: phase correlation, Kuglin and Hines 1975; least-squares flow, Lucas and Kanade 1981, with one
vector for the whole frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.numerics.pixels import resize, widened

from .config import MotionConfig, SoftMotionConfig
from .video_input import videos_of

__all__ = ["DIRECTIONS", "MotionReward", "build", "build_soft", "flow_shifts", "phase_shifts"]

DIRECTIONS: Mapping[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
"""x to the right, y downwards."""
_FLOOR = 1e-3
"""Fraction of the largest amplitude: frequencies far below it are rounding, whose phase says nothing."""
_FLAT = 1e-5
"""Mean squared slope, 0.003 of the range from one pixel to the next, at which half of a motion is seen.
Without it, what the frame cannot show would be rounding divided by nothing, and its gradient useless."""


def build(config: MotionConfig, *, device: Any) -> MotionReward:
    return MotionReward(config, name="motion", shifts=lambda frames: phase_shifts(frames.detach()))


def build_soft(config: SoftMotionConfig, *, device: Any) -> MotionReward:
    return MotionReward(config, name="soft-motion", shifts=partial(flow_shifts, edge_px=config.edge_px))


class MotionReward:
    """shifts: the displacement between neighbouring frames, [F, 3, H, W] -> [F - 1, 2] pixels."""

    def __init__(self, config: MotionConfig, *, name: str, shifts: Callable[[Tensor], Tensor]) -> None:
        check_config(config, key=f"reward.{name}")
        self._name, self._speed, self._shifts = name, config.speed, shifts

    def score(self, samples: ScoreInput) -> Scores:
        """[N] mean over neighbouring frames of how well their motion v agrees with the metadata `motion`.

        With v and the target in shorter edges per second, x to the right and y downwards, and s = `speed`:
            a direction u (`left`, `right`, `up`, `down`):   (v . u) / sqrt(|v|^2 + s^2), -1 to 1
            a velocity t = [x, y]; `still` is [0, 0]:        s^2 / (|v - t|^2 + s^2), 0 to 1
        Components: `x` and `y`, the mean of v; `speed`, the mean of |v|.

        Raises RewardFailed for other metadata, and as `videos_of` for fewer than two frames.
        """
        videos, rate = videos_of(samples, reward=self._name, least=2)
        scores: list[Tensor] = []
        parts: list[Tensor] = []
        for row, frames in enumerate(videos):
            direction, target = self._wanted(samples, row)
            v = self._shifts(widened(frames)) * (rate / min(frames.shape[-2:]))
            spread = (v - v.new_tensor(target)).square().sum(dim=1) + self._speed**2
            agreement = (v @ v.new_tensor(direction)) / spread.sqrt() if any(direction) else self._speed**2 / spread
            scores.append(agreement.mean())
            parts.append(torch.cat([v.mean(dim=0), torch.linalg.vector_norm(v, dim=1).mean()[None]]))
        x, y, speed = torch.stack(parts).unbind(1)
        return Scores(values=torch.stack(scores), parts={"x": x, "y": y, "speed": speed})

    def close(self) -> None:
        pass

    def _wanted(self, samples: ScoreInput, row: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """A direction and the target 0, or the direction 0 and a target."""
        result = samples.metadata[row].get("motion")
        if isinstance(result, str) and result in DIRECTIONS:
            return DIRECTIONS[result], (0.0, 0.0)
        if result == "still":
            return (0.0, 0.0), (0.0, 0.0)
        if isinstance(result, list | tuple) and len(result) == 2 and all(map(_is_finite, result)):  # pyright: ignore[reportUnknownArgumentType]
            return (0.0, 0.0), (float(result[0]), float(result[1]))  # pyright: ignore[reportUnknownArgumentType]
        said = f"is {result!r}" if "motion" in samples.metadata[row] else "is missing"
        raise RewardFailed(
            f"reward.{self._name}: metadata 'motion' of sample {samples.sample_ids[row]!r} (prompt "
            f"{samples.inputs.prompts[row]!r}) {said}, expected {', '.join(DIRECTIONS)}, still, or a velocity [x, y] "
            "in shorter edges per second."
        )


def phase_shifts(frames: Tensor) -> Tensor:
    """[F - 1, 2] displacement in pixels (x, y) of frames [F, 3, H, W], by phase correlation; without a gradient.

    The peak of the inverse transform of X / (|X| + floor), X the product of a frame's spectrum with the conjugate of
    the one before, to fractions of a pixel by the centroid of the 3 x 3 values around it. It is the motion of most of
    the detail: an object's on a plain ground, else the camera's. Displacements count modulo the size, up to half of it.
    """
    height, width = frames.shape[-2:]
    grey = frames.mean(dim=1)
    spectrum = torch.fft.rfft2(grey - grey.mean(dim=(1, 2), keepdim=True))
    cross = spectrum[1:] * spectrum[:-1].conj()
    size = cross.abs()
    floor = _FLOOR * size.amax(dim=(1, 2), keepdim=True) + torch.finfo(size.dtype).tiny
    surface = torch.fft.irfft2(cross / (size + floor), s=(height, width))
    peaks = surface.flatten(1).argmax(dim=1)
    steps = torch.arange(-1, 2, device=frames.device)
    result: list[Tensor] = []
    for plane, peak in zip(surface, peaks, strict=True):
        top, left = peak // width, peak % width
        near = plane[((top + steps) % height)[:, None], (left + steps) % width].clamp(min=0)
        total = near.sum() + torch.finfo(near.dtype).tiny
        x, y = left + (near.sum(dim=0) @ steps.to(near)) / total, top + (near.sum(dim=1) @ steps.to(near)) / total
        result.append(torch.stack([(x + width / 2) % width - width / 2, (y + height / 2) % height - height / 2]))
    return torch.stack(result)


def flow_shifts(frames: Tensor, *, edge_px: int) -> Tensor:
    """[F - 1, 2] displacement in pixels (x, y) of frames [F, 3, H, W], by least squares; with a gradient.

    Per pair the v that minimises sum (I_x v_x + I_y v_y + I_t)^2 over the pixels inside, I the mean of the channels on
    frames reduced to a shorter edge of `edge_px`: I_x and I_y are central differences of the mean of both frames, I_t
    is their difference. Right for displacements well under the size of what moves, less a share of 1e-5 / (1e-5 + mean
    squared slope); along an edge, or in a flat frame, the part that cannot be seen is 0.
    """
    height, width = frames.shape[-2:]
    scale = max(1.0, min(height, width) / edge_px)
    rows, columns = round(height / scale), round(width / scale)
    grey = resize(frames, (rows, columns), filter="bilinear").mean(dim=1)
    middle = (grey[1:] + grey[:-1]) / 2
    slopes = torch.stack(
        [(middle[:, 1:-1, 2:] - middle[:, 1:-1, :-2]) / 2, (middle[:, 2:, 1:-1] - middle[:, :-2, 1:-1]) / 2], dim=-1
    ).flatten(1, 2)
    change = (grey[1:] - grey[:-1])[:, 1:-1, 1:-1].flatten(1)
    count = change.shape[1]
    normal = slopes.mT @ slopes / count + _FLAT * torch.eye(2, dtype=slopes.dtype, device=slopes.device)
    v = -torch.linalg.solve(normal, slopes.mT @ change[..., None] / count)[..., 0]
    return v * v.new_tensor([width / columns, height / rows])


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
