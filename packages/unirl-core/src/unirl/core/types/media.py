"""Media: the images, videos, texts or sounds that samples become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from ..errors import BatchError
from .array import Array
from .batch import Batch, rows, shared

__all__ = ["Media", "MediaKind"]

MediaKind = Literal["image", "video", "text", "audio"]

DIMS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("3", "H", "W"),
    "video": ("F", "3", "H", "W"),
    "audio": ("C", "S"),
}
"""Dims of one sample; those that are a number have that size."""


@dataclass(frozen=True, kw_only=True)
class Media(Batch):
    """Media of N samples, all of one kind."""

    kind: MediaKind = shared()
    values: Array | tuple[Array, ...] | tuple[str, ...] = rows()
    """`image`: [N, 3, H, W], or N arrays [3, H, W] of any size.  `video`: [N, F, 3, H, W], or N arrays [F, 3, H, W] of
    any size and length.  `audio`: [N, C, S], or N arrays [C, S].  `text`: N strings.  Arrays are floating; pixels lie
    in [0, 1], sound in [-1, 1]."""
    rate: float | None = shared(default=None)
    """Frames per second of videos, Hz of audio; None where it is not known."""

    def __post_init__(self) -> None:
        if self.kind == "text":
            self._check_texts()
        elif self.kind in DIMS:
            self._check_arrays(DIMS[self.kind])
        else:
            raise BatchError(f"Media.kind: got {self.kind!r}, expected one of {', '.join(DIMS)}, text.")
        if self.rate is not None and (self.kind not in ("video", "audio") or not self.rate > 0):
            raise BatchError(
                f"Media.rate: got {self.rate} for {self.kind}, expected a number above 0, of video or audio."
            )

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
    def arrays(self) -> tuple[Array, ...]:
        """The array of each sample. Raises BatchError for text."""
        if self.kind == "text":
            raise BatchError("Media: got text, expected image, video or audio.")
        return tuple(cast("tuple[Array, ...]", self.values))

    @property
    def stacked(self) -> Array:
        """[N, ...], one array of all samples. Raises BatchError for text, and where sizes differ."""
        if not isinstance(self.values, tuple):
            return self.values
        sizes = {tuple(array.shape) for array in self.arrays}
        if len(sizes) != 1:
            raise BatchError(f"Media: got {self.kind}s of sizes {sorted(sizes)}, expected one size.")
        import torch

        return torch.stack(self.arrays)

    def contiguous(self) -> Self:
        """The same media, contiguous in memory."""
        return self._changed(lambda array: array.contiguous())

    def fetched(self) -> Self:
        """The same media in the memory of this process, wherever they lie, and without gradient."""
        return self._changed(lambda array: array.detach().cpu())

    def _changed(self, change: Callable[[Array], Array]) -> Self:
        if self.kind == "text":
            return self
        if isinstance(self.values, tuple):
            return replace(self, values=tuple(change(array) for array in self.arrays))
        return replace(self, values=change(self.values))

    def _check_texts(self) -> None:
        values = cast(object, self.values)
        if not isinstance(values, tuple):
            raise BatchError(f"Media.values of text: got {type(values).__name__}, expected a tuple of strings.")
        for row, value in enumerate(cast("tuple[object, ...]", values)):
            if not isinstance(value, str):
                raise BatchError(f"Media.values of text: row {row} is a {type(value).__name__}, expected a string.")

    def _check_arrays(self, dims: tuple[str, ...]) -> None:
        is_ragged = isinstance(self.values, tuple)
        for row, array in enumerate(cast("Sequence[Any]", self.values if is_ragged else (self.values,))):
            expected = dims if is_ragged else ("N", *dims)
            shape = tuple(getattr(array, "shape", ()))
            fits = len(shape) == len(expected) and all(
                not dim.isdigit() or size == int(dim) for dim, size in zip(expected, shape, strict=True)
            )
            if not fits or not array.dtype.is_floating_point:
                result = f"shape {list(shape)} and dtype {array.dtype}" if shape else f"a {type(array).__name__}"
                raise BatchError(
                    f"Media.values of {self.kind}: got {result}{f' in row {row}' if is_ragged else ''}, expected a "
                    f"floating tensor [{', '.join(expected)}]."
                )
