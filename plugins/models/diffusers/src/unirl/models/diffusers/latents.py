"""The layout of a pipeline's latents: tokens or places, and what they are in pixels and frames."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from unirl.model_host.diffusion.sizes import Sizes

from .session import Size

__all__ = ["Grid"]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A latent is [C, h, w], or [C, F, h, w] of a video, whatever the pipeline steps through: tokens are places in the
    order of rows."""

    unit: int
    """Sides of images are multiples of it, in pixels."""
    side: int
    """Pixels of a place of the latent along a side."""
    frame_step: int
    """Frames are one more than a multiple of it; 0 for a pipeline of images."""
    is_packed: bool
    """The pipeline steps through tokens [B, F h w, C]."""
    is_channels_last: bool = False
    """The pipeline steps through [B, F, h, w, C]."""

    @property
    def sizes(self) -> Sizes:
        """Sizes that the pipeline takes."""
        step = self.frame_step
        return Sizes(factor=self.side, unit=self.unit, rate=step, frame_step=step or 1)

    @classmethod
    def found(cls, state_shape: Callable[[Size], Shape | None], size: Size, *, makes_videos: bool) -> Grid:
        """From the shapes [...] of states without their batch: of `size`, and of sizes near it.

        state_shape: None for a size that the pipeline refuses.  Raises ValueError for states of another form.
        """
        shape = state_shape(size)
        if shape is None:
            raise ValueError(f"it takes no {size.height} x {size.width} pixels")

        # Of single frames, as a VAE may encode images of each size.
        first = dataclasses.replace(size, frames=1)
        still = state_shape(first)
        if still is None:
            raise ValueError("it takes no single frame")
        # Pipelines round what does not fit, or refuse it: a size that fits has as many more places as it has pixels.
        for unit in (1, 2, 4, 8, 16, 32, 64):
            other = state_shape(dataclasses.replace(first, height=size.height + unit))
            if other and math.prod(other) * size.height == math.prod(still) * (size.height + unit):
                break
        else:
            raise ValueError(f"its latents, {list(still)}, do not grow with the height")
        is_packed = len(shape) == 2
        is_channels_last = makes_videos and len(shape) == 4 and still[-3] != other[-3]
        if is_channels_last:
            shape, still = (*shape[-1:], *shape[:-1]), (*still[-1:], *still[:-1])
        if is_packed and not makes_videos:
            side = math.isqrt(size.height * size.width // shape[0])
        else:
            side = unit if is_packed else max(size.height // shape[-2], 1)
        places = (size.height // side) * (size.width // side)
        frames = (shape[0] // places if is_packed else shape[1]) if makes_videos else 1
        frame_step = (size.frames - 1) // max(frames - 1, 1) if makes_videos else 0
        grid = cls(unit=unit, side=side, frame_step=frame_step, is_packed=is_packed, is_channels_last=is_channels_last)
        channels = shape[-1] if is_packed else shape[0]
        for result, asked in ((shape, size), (still, first)):
            expected = grid.latent_shape(channels, asked)
            if result not in (expected, (math.prod(expected[1:]), channels)):
                raise ValueError(
                    f"its latents are {list(result)} for {size.height} x {size.width} pixels and {asked.frames} "
                    f"frames, expected {list(expected)} or tokens of it"
                )
        return grid

    def latent_shape(self, channels: int, size: Size) -> Shape:
        places = size.height // self.side, size.width // self.side
        return (channels, *((1 + (size.frames - 1) // self.frame_step,) if self.frame_step else ()), *places)

    def size(self, shape: Shape, *, max_sequence_length: int) -> Size:
        """Size in pixels and frames of a latent of this shape."""
        return Size(
            height=shape[-2] * self.side,
            width=shape[-1] * self.side,
            frames=(shape[1] - 1) * self.frame_step + 1 if self.frame_step else 1,
            max_sequence_length=max_sequence_length,
        )

    def state(self, latents: Tensor) -> Tensor:
        """[B, *latent_shape] as the pipeline steps through it."""
        if self.is_channels_last:
            return latents.movedim(1, -1)
        return latents.flatten(2).transpose(1, 2) if self.is_packed else latents

    def latents(self, state: Tensor, shape: Shape) -> Tensor:
        """The inverse of `state`, for a latent of this shape."""
        if self.is_channels_last:
            return state.movedim(-1, 1)
        return state.transpose(1, 2).reshape(len(state), *shape) if self.is_packed else state
