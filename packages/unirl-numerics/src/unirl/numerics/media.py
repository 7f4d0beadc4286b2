"""Media files to tensors: the one reader of the images and videos that prompts refer to. And images to files.

Models, engines in their environments and rewards all read through it, so that they see the same pixels.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from unirl.core.disk import writing
from unirl.core.errors import BatchError, DataError
from unirl.core.types.data import MediaRef
from unirl.core.types.media import Media

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_FRAMES", "MAX_PIXELS", "LoadedImage", "load_image", "load_picture", "load_video", "save_images"]

MAX_PIXELS = 2**26
"""Pixels of the largest image or frame, 8192 x 8192. A file of a few kB can claim billions."""
MAX_FRAMES = 2**12
"""Frames of the longest video."""
_STILL = {"image2", "png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe", "gif"}
"""Formats in which PyAV reads pictures."""


@dataclass(frozen=True, kw_only=True)
class LoadedImage(MediaRef):
    """An image in memory instead of a file, such as one that came over the wire."""

    pixels: Tensor = field(compare=False, repr=False)
    """As `load_image` gives them."""

    @classmethod
    def of(cls, pixels: Tensor, *, role: str) -> LoadedImage:
        """pixels: [3, H, W] fp32 in [0, 1]. Equal pixels get equal URIs, and different ones different URIs."""
        pixels = pixels.contiguous()
        content = hashlib.sha256(repr(tuple(pixels.shape)).encode() + pixels.numpy().tobytes())
        return cls(modality="image", role=role, uri=f"sha256:{content.hexdigest()}", pixels=pixels)


def load_image(ref: MediaRef) -> Tensor:
    """[3, H, W] fp32 in [0, 1], sRGB, turned as its EXIF orientation says; transparency lies on white; CMYK is
    converted by the colour profile of the file, or by Pillow's formula without one.

    Values of 8 bits are n / 255 and those of 16 bits n / 65535, exactly.
    Raises DataError for a reference to other media, and for a file that is missing, broken, animated, or larger than
    MAX_PIXELS.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    _check_modality(ref, "image")
    if isinstance(ref, LoadedImage):
        return ref.pixels
    with _opened(ref) as file:
        try:
            # The bound below is ours, on the size that the header states.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(file)
            _check_size(ref, *image.size)
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise DataError(f"{_name(ref)}: got an animation of {frames} frames, expected a single image.")
            return _pixels(ImageOps.exif_transpose(image))
        except UnidentifiedImageError as error:
            raise DataError(f"{_name(ref)}: not an image in a format that Pillow reads.") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            # Pillow's readers raise these three for files that are cut off or inconsistent.
            raise DataError(f"{_name(ref)}: the image is broken: {error}.") from error


def load_picture(ref: MediaRef) -> Image:
    """The same as an image of Pillow, as processors and pipelines take it: files of 8 bits come back exactly, others
    are rounded."""
    from PIL import Image

    return Image.fromarray(_levels(load_image(ref)))


def load_video(ref: MediaRef) -> tuple[Tensor, float]:
    """[F, 3, H, W] fp32 in [0, 1] of all frames of the first video stream, and its average frames per second.

    Needs the extra `video` (PyAV). Raises DataError for a reference to other media, and for a file that is missing,
    broken, a still image, without a video stream, or larger than MAX_PIXELS a frame or MAX_FRAMES.
    """
    _check_modality(ref, "video")
    try:
        av: Any = import_module("av")
    except ImportError as error:
        raise DataError(
            f"{_name(ref)}: reading videos needs PyAV. Install it: `pip install 'unirl-numerics[video]'`."
        ) from error
    with _opened(ref) as file:
        try:
            with av.open(file) as container:
                if container.format.name in _STILL:
                    raise DataError(f"{_name(ref)}: got a picture ({container.format.name}), expected a video.")
                if not container.streams.video:
                    raise DataError(f"{_name(ref)}: the file has no video stream.")
                stream = container.streams.video[0]
                _check_size(ref, stream.width, stream.height)
                frames = list(_frames(ref, container, stream))
                rate = stream.average_rate
        except av.FFmpegError as error:
            raise DataError(f"{_name(ref)}: the video is broken: {error}.") from error
    if not frames or not rate:
        raise DataError(f"{_name(ref)}: the video has {len(frames)} frames at a rate of {rate}; expected both above 0.")
    return torch.stack(frames), float(rate)


def save_images(images: Media | None, folder: Path, *, role: str) -> list[tuple[MediaRef, ...]]:
    """Write each image as a PNG, rounded to 8 bits; `load_image` gives the rounded values back exactly.

    Returns a reference of this role for each. Files are named after their pixels, so that equal images share one.
    Raises BatchError for samples without images and for pixels that are not finite, and DiskFull.
    """
    from PIL import Image

    if images is None or images.kind != "image":
        raise BatchError(f"{role}: got {'samples without media' if images is None else images.kind}, expected images.")
    folder.mkdir(parents=True, exist_ok=True)
    result: list[tuple[MediaRef, ...]] = []
    for row, image in enumerate(images.mapped(lambda array: array.detach().cpu()).arrays):
        image = image.float()
        if not bool(image.isfinite().all()):
            raise BatchError(f"{role} image {row}: got pixels that are not finite, expected values in [0, 1].")
        levels = _levels(image.clamp(0, 1))
        pixels = hashlib.sha256(repr(levels.shape).encode() + levels.tobytes())
        file = folder / f"{pixels.hexdigest()[:32]}.png"
        if not file.exists():
            # Renamed when complete: another thread may be reading the same image of an earlier piece.
            part = file.with_suffix(".part")
            try:
                with writing(file):
                    Image.fromarray(levels).save(part, format="PNG")
                part.replace(file)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        result.append((MediaRef(modality="image", role=role, uri=str(file)),))
    return result


def _frames(ref: MediaRef, container: Any, stream: Any) -> Iterator[Tensor]:
    for number, frame in enumerate(container.decode(stream)):
        if number == MAX_FRAMES:
            raise DataError(f"{_name(ref)}: the video has more than {MAX_FRAMES} frames.")
        yield _planes(frame.to_ndarray(format="rgb24"), 255)


def _pixels(image: Image) -> Tensor:
    from PIL import Image as images

    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError(f"grey values reach from {grey.min()} to {grey.max()}, expected 16 bits")
        return _planes(np.repeat(grey[..., None], 3, axis=2), 65535)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no stated range")
    if image.mode == "CMYK" and (profile := image.info.get("icc_profile")):
        image = _by_profile(image, profile)
    if image.has_transparency_data:
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return _planes(np.asarray(image.convert("RGB")), 255)


def _by_profile(image: Image, profile: bytes) -> Image:
    cms: Any = import_module("PIL.ImageCms")
    try:
        source = cms.ImageCmsProfile(io.BytesIO(profile))
        return cms.profileToProfile(image, source, cms.createProfile("sRGB"), outputMode="RGB")
    except (OSError, cms.PyCMSError) as error:
        raise ValueError(f"its CMYK colour profile cannot be applied: {error}") from error


def _planes(pixels: np.ndarray[Any, Any], largest: int) -> Tensor:
    """[H, W, 3] integers to [3, H, W] in [0, 1]."""
    return torch.as_tensor(pixels.astype(np.float32) / np.float32(largest)).permute(2, 0, 1).contiguous()


@contextmanager
def _opened(ref: MediaRef) -> Generator[IO[bytes]]:
    """A local file, or through fsspec one elsewhere."""
    try:
        if "://" in ref.uri:
            opened: Any = import_module("fsspec").open(ref.uri, "rb")
        else:
            opened = Path(ref.uri).open("rb")  # noqa: SIM115  # closed below
        with opened as file:
            yield file
    except (FileNotFoundError, IsADirectoryError, PermissionError, ConnectionError, ImportError) as error:
        raise DataError(f"{_name(ref)}: it cannot be opened: {error}.") from error


def _check_modality(ref: MediaRef, expected: str) -> None:
    if ref.modality != expected:
        raise DataError(f"{_name(ref)}: got a reference to media of modality {ref.modality!r}, expected {expected!r}.")


def _check_size(ref: MediaRef, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{_name(ref)}: got {width} x {height} pixels, the limit is {MAX_PIXELS}. Scale it down beforehand."
        )


def _name(ref: MediaRef) -> str:
    return f"media {ref.uri!r} ({ref.role})"


def _levels(image: Tensor) -> Any:
    """[H, W, 3] bytes of an image [3, H, W] in [0, 1], as NumPy has them."""
    return (image * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
