"""Sizes of images that have a token of their ratio. Imports nothing heavy: recipes are checked with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.core.limits import Reason
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["MORE_RATIOS", "NUM_RATIOS", "Resolutions"]

NUM_RATIOS = 33
"""Ratios of every checkpoint, from 1:4 to 4:1 as height to width."""
MORE_RATIOS = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
"""Heights and widths of the four ratios that some checkpoints have besides, where the base is 1024."""
_SQUARES = (512, 640, 768, 896)
"""Sides of squares below the base that those checkpoints generate under the token of 1:1."""


@dataclass(frozen=True, kw_only=True)
class Resolutions:
    base: int
    """Side of the square, in pixels; others have about its area."""
    unit: int
    """Sides are multiples of it."""
    has_more: bool
    """Whether the tokenizer has tokens of `MORE_RATIOS`."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width by number of the ratio."""
        half, step = self.base // 2, self.base // 16

        def side(change: int) -> int:
            return min(max(self.base + change * step, half), 2 * self.base) // self.unit * self.unit

        result = [(side(change), side(-change)) for change in range(-16, 17)]
        return [*result, *map(self._scaled, MORE_RATIOS)] if self.has_more else result

    def ratio(self, height: int, width: int) -> int | None:
        """Number of the ratio of a size that is generated; None for other sizes."""
        sizes = self.sizes
        if (height, width) in sizes:
            return sizes.index((height, width))
        squares = [self._scaled((side, side)) for side in _SQUARES] if self.has_more else []
        return sizes.index((self.base, self.base)) if (height, width) in squares else None

    def nearest(self, height: int, width: int) -> int:
        """Number of the ratio that is nearest to that of a source image."""
        return min(enumerate(self.sizes), key=lambda item: abs(item[1][0] / item[1][1] - height / max(width, 1)))[0]

    def problems(self, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        """A reason for a size without a token, keys relative to the section of sampling."""
        height, width = sampling.height, sampling.width
        if self.ratio(height, width) is None:
            near = self.sizes[self.nearest(height, width)]
            text = f"got {height} x {width} (height x width), which the checkpoint has no token for. The nearest ratio "
            key = ".width" if any(height == size[0] for size in self.sizes) else ".height"
            yield Reason(key=key, text=f"{text}is that of {near[0]} x {near[1]}.")
        if sampling.frames != 1:
            yield Reason(key=".frames", text=f"got {sampling.frames}, expected 1: the model generates single images.")

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        height, width = (side * self.base // 1024 // self.unit * self.unit for side in size)
        return height, width
