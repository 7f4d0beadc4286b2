"""Source images of FLUX.2 [klein], prepared for its VAE as the pipeline prepares them. Also imported by bridges in the
environments of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.data import MediaRef

__all__ = ["MAX_AREA", "Sources"]

MAX_AREA = 1024 * 1024
"""In pixels; larger images are scaled down."""


class Sources:
    """Base of the bridges."""

    @staticmethod
    def pixels(media: Sequence[MediaRef], processor: Any, *, unit: int) -> list[Tensor]:
        """[1, 3, H, W] in [-1, 1] of each image, cropped to multiples of `unit`. processor: `Flux2ImageProcessor` of
        diffusers, or an engine's copy.

        Raises DataError for an image that cannot be read, or that the pipeline does not take.
        """
        from unirl.core.errors import DataError
        from unirl.numerics.media import load_picture

        result: list[Tensor] = []
        for ref in media:
            image = load_picture(ref)
            try:
                processor.check_image_input(image)
            except ValueError as error:
                raise DataError(f"media {ref.uri!r}: {error}.") from error
            if image.width * image.height > MAX_AREA:
                image = processor._resize_to_target_area(image, MAX_AREA)
            height, width = (side // unit * unit for side in (image.height, image.width))
            result.append(processor.preprocess(image, height=height, width=width, resize_mode="crop"))
        return result
