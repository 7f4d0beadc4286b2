"""Media: the images, videos, texts or sounds that samples become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from ..errors import BatchError
from .array import Array
from .batch import Batch, rows, shared

__all__ = ["FramesRead", "Media", "MediaKind", "spread", "unit_range"]

MediaKind = Literal["image", "video", "text", "audio"]

FramesRead = Callable[[int], Sequence[int] | None]
"""Number of frames of a video -> places of those that are read, from 0 and rising; None is all."""

DIMS: Mapping[str, tuple[str, ...]] = {"image": ("3", "H", "W"), "video": ("F", "3", "H", "W"), "audio": ("C", "S")}
"""Dims of one sample; those that are a number have that size."""


@dataclass(frozen=True, kw_only=True)
class Media(Batch):
    """Media of N samples, all of one kind."""

    kind: MediaKind = shared()
    values: Array | tuple[Array, ...] | tuple[str, ...] = rows()
    """`image`: [N, 3, H, W], or N arrays [3, H, W] of any size.  `video`: [N, F, 3, H, W], or N arrays [F, 3, H, W].
    `audio`: [N, C, S], or N arrays [C, S].  `text`: N strings.  Pixels are floating and lie in [0, 1], or uint8: level
    n is the value n / 255. Sound is floating and lies in [-1, 1]. `arrays` and `stacked` give floating values."""
    rate: float | None = shared(default=None)
    """Frames per second of videos, Hz of audio where it is known."""

    def __post_init__(self) -> None:
        if self.kind != "text" and self.kind not in DIMS:
            raise BatchError(f"Media.kind: got {self.kind!r}, expected one of {', '.join(DIMS)}, text.")
        if self.rate is not None and (self.kind not in ("video", "audio") or not self.rate > 0):
            raise BatchError(f"Media.rate: got {self.rate} for {self.kind}, expected more than 0, of video or audio.")
        if self.kind == "video" and self.rate is None:
            raise BatchError("Media.rate: got none for video, expected its frames per second.")
        is_ragged = isinstance(cast(object, self.values), tuple)
        dims = DIMS.get(self.kind, ()) if is_ragged else ("N", *DIMS.get(self.kind, ()))
        of = "floating" if self.kind == "audio" else "floating or uint8"
        expected = "a tuple of strings" if self.kind == "text" else f"a {of} tensor [{', '.join(dims)}]"
        for row, value in enumerate(cast("Sequence[Any]", self.values if is_ragged else (self.values,))):
            has_levels = self.kind != "audio"
            if not (is_ragged and type(value) is str if self.kind == "text" else _fits(value, dims, has_levels)):
                where = f" in row {row}" if is_ragged else ""
                raise BatchError(f"Media.values of {self.kind}: got {_described(value)}{where}, expected {expected}.")

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def texts(self) -> tuple[str, ...]:
        """N strings. Raises BatchError for another kind."""
        if self.kind != "text":
            raise BatchError(f"Media: got {self.kind}, expected text.")
        return cast("tuple[str, ...]", self.values)

    @property
    def stored(self) -> tuple[Array, ...]:
        """The array of each sample as it is stored: pixels may be uint8. Raises BatchError for text."""
        if self.kind == "text":
            raise BatchError("Media: got text, expected image, video or audio.")
        return tuple(cast("tuple[Array, ...]", self.values))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The array of each sample, floating. Raises BatchError for text."""
        return tuple(map(unit_range, self.stored))

    def array(self, row: int) -> Array:
        """The array of one sample, floating. Raises BatchError for text."""
        return unit_range(self.stored[row])

    @property
    def stacked(self) -> Array:
        """[N, ...], one floating array of all samples. Raises BatchError for text, and where sizes differ."""
        if not isinstance(self.values, tuple):
            return unit_range(self.values)
        sizes = {tuple(array.shape) for array in self.arrays}
        if len(sizes) != 1:
            raise BatchError(f"Media: got {self.kind}s of sizes {sorted(sizes)}, expected one size.")
        import torch

        return torch.stack(self.arrays)

    def mapped(self, change: Callable[[Array], Array]) -> Self:
        """The same media with each of its arrays changed, as it is stored; texts stay as they are."""
        if self.kind == "text":
            return self
        if isinstance(self.values, tuple):
            return replace(self, values=tuple(change(array) for array in self.stored))
        return replace(self, values=change(self.values))

    def with_frames(self, read: FramesRead) -> Self:
        """The same videos with these of their frames alone, `rate` being that of the frames that are left. Other media
        stay as they are.

        Raises BatchError for places that a video does not have, and where the rates come to differ between videos.
        """
        if self.kind != "video":
            return self
        ragged = cast("tuple[Array, ...]", self.values) if isinstance(self.values, tuple) else None
        counts = [len(array) for array in ragged] if ragged is not None else [cast("Array", self.values).shape[1]]
        places = [read(count) for count in counts]
        if all(chosen is None for chosen in places):
            return self
        rates: set[float] = set()
        for count, chosen in zip(counts, places, strict=True):
            picked = list(range(count)) if chosen is None else list(chosen)
            if not picked or picked != sorted(set(picked)) or not 0 <= picked[0] <= picked[-1] < count:
                raise BatchError(f"Media: got frames {picked[:9]}, expected some of {count}, each once and in order.")
            steps = len(picked) - 1
            rates.add(cast("float", self.rate) * (steps / (picked[-1] - picked[0]) if steps else 1.0))
        if len(rates) > 1:
            raise BatchError(
                f"Media: the frames read of videos of {sorted(set(counts))} frames have several rates, "
                f"{', '.join(f'{rate:g}' for rate in sorted(rates))} per second, expected one. Give them one length."
            )
        import torch

        def left(array: Array, chosen: Sequence[int] | None, dim: int) -> Array:
            return array if chosen is None else array.index_select(dim, torch.tensor(chosen, device=array.device))

        if ragged is not None:
            values = tuple(left(array, chosen, 0) for array, chosen in zip(ragged, places, strict=True))
            return replace(self, values=values, rate=rates.pop())
        return replace(self, values=left(cast("Array", self.values), places[0], 1), rate=rates.pop())

    @classmethod
    def _concat(cls, batches: Sequence[Any]) -> Self:
        """Joined, torch would take levels of 8 bits for values in [0, 1]."""
        dtypes = {str(each.values.dtype) for each in batches if not isinstance(each.values, tuple)}
        if len(dtypes) > 1 and "torch.uint8" in dtypes:
            raise BatchError(f"Media.concat: got {' and '.join(sorted(dtypes))} pixels, expected one of them.")
        return super()._concat(batches)


def spread(count: int, total: int) -> list[int]:
    """Places of `count` frames out of `total` at equal distances, the first and the last among them; all of them where
    there are fewer, the first for a count of 1. Of videos of `count` frames it gives all, so it may be asked again."""
    steps = min(count, total) - 1
    return [round(place * (total - 1) / steps) for place in range(steps + 1)] if steps > 0 else [0]


def unit_range(pixels: Array) -> Array:
    """Pixels in [0, 1]: those of uint8 as n / 255 in fp32, exactly rounded; floating ones as they are."""
    if pixels.dtype.is_floating_point:
        return pixels
    import torch

    # By a tensor on the device: of a Python number a GPU would multiply by the rounded reciprocal.
    return pixels.float() / torch.tensor(255.0, device=pixels.device)


def _fits(value: Any, dims: tuple[str, ...], has_levels: bool) -> bool:
    """Whether it is a floating tensor of these dims, or one of uint8 where it may be."""
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != len(dims):
        return False
    if not (value.dtype.is_floating_point or (has_levels and str(value.dtype) == "torch.uint8")):
        return False
    return all(dim != "3" or size == 3 for dim, size in zip(dims, shape, strict=True))


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
