"""Sizes of images and videos that a checkpoint generates. Imports nothing heavy: recipes are checked with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.core.limits import Reason
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["Sizes"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    factor: int
    """Pixels of a latent element along a side."""
    unit: int
    """Sides are multiples of it, in pixels."""
    largest: int | None = None
    """Largest side, in pixels."""
    rate: int = 0
    """Frames of a latent frame; 0 for a model of single images."""
    frame_step: int = 1
    """Frames are `least_frames` plus a multiple of it."""
    least_frames: int = 1
    most_frames: int | None = None

    def problems(self, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        """A reason, with the nearest valid value, for each size that the checkpoint does not generate. Keys are
        relative to the section of sampling, such as `.height`."""
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            yield from _problem(name, size, first=self.unit, step=self.unit, largest=self.largest)
        if self.rate:
            first, step = self.least_frames, self.frame_step
            yield from _problem("frames", sampling.frames, first=first, step=step, largest=self.most_frames)
        elif sampling.frames != 1:
            yield Reason(key=".frames", text=f"got {sampling.frames}, expected 1: the model generates single images.")

    def latent(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[H, W] of a latent, [F, H, W] of a video's."""
        sides = sampling.height // self.factor, sampling.width // self.factor
        return (1 + (sampling.frames - 1) // self.rate, *sides) if self.rate else sides


def _problem(name: str, size: int, *, first: int, step: int, largest: int | None) -> Iterator[Reason]:
    """Unless `size` is first + k step, k >= 0, and at most `largest`."""
    steps, rest = divmod(size - first, step)
    if rest == 0 and first <= size <= (largest or size):
        return
    around = {first + max(steps + more, 0) * step for more in (0, 1)}
    near = sorted({min(fitting, largest or fitting) for fitting in around})
    rule = f"a multiple of {step}{'' if first == step else f' plus {first}'}"
    limits = f" from {first} to {largest}" if largest else ""
    text = f"got {size}, expected {rule}{limits}. Nearest: {' or '.join(map(str, near))}."
    yield Reason(key=f".{name}", text=text)
