"""Images that are accepted as the first frame of a video. Also imported by bridges in the environments of engines, so
that these refuse the same images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from unirl.core.errors import DataError
from unirl.numerics.media import load_picture

if TYPE_CHECKING:
    from unirl.core.types.data import MediaRef
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["FirstFrame"]


class FirstFrame:
    """Base of models and bridges."""

    crops_frame: ClassVar[bool]
    """The frame is cropped about its middle to the ratio of the video; otherwise it is stretched."""
    max_frame_ratio: ClassVar[float]
    """Largest quotient, above 1, of the ratios of frame and video."""

    @classmethod
    def first_frame(cls, media: Sequence[MediaRef], sampling: LatentSamplingConfig, *, prompt: str) -> Any:
        """The first frame as a PIL image of 8 bits, in its own size. prompt: for the error.

        Raises DataError unless there is one image that can be read, of a ratio close enough to the video's.
        """
        if len(media) != 1:
            got = f"{len(media)} source images" if media else "no source image"
            raise DataError(
                f"prompt {prompt}: got {got}, expected one, the first frame of the video, as media of role `source` "
                "and modality `image`; this model takes no last frame."
            )
        image = load_picture(media[0])
        ratio = image.width * sampling.height / (image.height * sampling.width)
        ratio = max(ratio, 1 / ratio)
        if ratio > cls.max_frame_ratio:
            result = (
                f"show {1 / ratio:.0%} of it, expected at least {1 / cls.max_frame_ratio:.0%}"
                if cls.crops_frame
                else f"stretch it by {ratio - 1:.0%}, expected at most {cls.max_frame_ratio - 1:.0%}"
            )
            raise DataError(
                f"prompt {prompt}, media {media[0].uri!r}: got {image.width} x {image.height} pixels for a video of "
                f"{sampling.width} x {sampling.height}, which would {result}. Crop it beforehand, or change "
                "sampling.height and sampling.width."
            )
        return image
