"""Pixels on the wire: raw tensor bytes, or lossless image files of 8 bits a channel."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from unirl.core.types.media import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = [
    "ITEM_BYTES",
    "Codec",
    "Encoded",
    "Raw",
    "WireError",
    "check_pixel_range",
    "packed",
    "stated_size",
    "unpacked",
]

Codec = Literal["raw", "png", "webp"]
ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
PNG = b"\x89PNG\r\n\x1a\n"
SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


class WireError(ValueError):
    """Bytes that are not a valid message, or one past a limit."""

    def __init__(self, code: Literal["bad_request", "bad_media", "too_large"], message: str) -> None:
        super().__init__(message)
        self.code = code


class Raw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="raw"):
    """The bytes of a tensor in C order, little-endian. uint8 are levels of pixels: n is the value n / 255."""

    dtype: Literal["float64", "float32", "float16", "bfloat16", "uint8"]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=4)]
    data: bytes


class Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="files"):
    """Image files: one for an image, one a frame for a video."""

    codec: Literal["png", "webp"]
    files: Annotated[list[bytes], msgspec.Meta(min_length=1)]


def stated_size(file: bytes, codec: str, *, where: str) -> tuple[int, int]:
    """Width and height by the header of an image file, in a time that its size and content do not change.

    Pillow reads, and unpacks, all metadata of a file to tell its size.
    """
    size = (0, 0)
    if codec == "png" and file[:8] == PNG and file[8:16] == b"\0\0\0\rIHDR" and len(file) >= 24:
        size = struct.unpack_from(">II", file, 16)
    elif codec == "webp" and file[:4] == b"RIFF" and file[8:12] == b"WEBP" and len(file) >= 30:
        kind, low = file[12:16], 0x3FFF
        if kind == b"VP8X":
            size = (1 + int.from_bytes(file[24:27], "little"), 1 + int.from_bytes(file[27:30], "little"))
        elif kind == b"VP8L" and file[20] == 0x2F:
            bits = int.from_bytes(file[21:25], "little")
            size = (1 + (bits & low), 1 + (bits >> 14 & low))
        elif kind == b"VP8 " and file[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", file, 26)
            size = (width & low, height & low)
    if not all(size):
        raise WireError("bad_media", f"{where}: not a {codec} file: its header cannot be read.")
    return size


def _opened(file: bytes, codec: str, *, where: str) -> Image:
    """The image of the size that its header states; its pixels are not decoded yet."""
    from PIL import Image

    size = stated_size(file, codec, where=where)
    if codec == "png":
        file = _pixels_alone(file, where=where)
    try:
        image = Image.open(io.BytesIO(file), formats=[codec.upper()])
        frames = int(getattr(image, "n_frames", 1))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise WireError("too_large", f"{where}: {_said(error)}.") from error
    except Exception as error:  # Whatever a decoder makes of hostile bytes: SyntaxError, struct.error, and more.
        raise WireError("bad_media", f"{where}: not a {codec} file: {_said(error)}.") from error
    if frames != 1 or image.mode != "RGB":
        raise WireError("bad_media", f"{where}: got {frames} frames of {image.mode}, expected one of RGB, 8 bits each.")
    if image.size != size:
        raise WireError("bad_media", f"{where}: got a {codec} file of {image.size}, expected {size} by its header.")
    return image


def _pixels_alone(file: bytes, *, where: str) -> bytes:
    """A PNG without texts, profiles and other metadata, which would be unpacked and are not used."""
    most = 64 + len(file) // 1024
    kept, at, count, is_changed = [PNG], len(PNG), 0, False
    while at + 8 <= len(file):
        size, kind = struct.unpack_from(">I4s", file, at)
        count += 1
        if count > most:
            raise WireError("too_large", f"{where}: got more than {most} chunks in a png file of {len(file)} bytes.")
        if kind == b"acTL":
            raise WireError("bad_media", f"{where}: got an animated png file, expected one frame.")
        if kind in (b"IHDR", b"IDAT", b"IEND"):
            kept.append(file[at : at + 12 + size])
        else:
            is_changed = True
        at += 12 + size
    return b"".join(kept) if is_changed else file


def packed(array: Tensor, kind: MediaKind, *, codec: Codec, name: str) -> Raw | Encoded:
    import torch

    array = array.detach().cpu().contiguous()
    if codec == "raw" or kind == "audio":
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise WireError(
                "bad_media", f"sample {name!r}: got {dtype} values, expected one of {', '.join(ITEM_BYTES)}."
            )
        data = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        return Raw(dtype=cast(Any, dtype), shape=list(array.shape), data=data)
    if array.dtype != torch.uint8:
        check_pixel_range(array, name)
        array = array.float().mul(255).round().clamp(0, 255).to(torch.uint8)
    bytes_of = (array if kind == "video" else array[None]).permute(0, 2, 3, 1)
    return Encoded(codec=codec, files=[_file(frame, codec) for frame in bytes_of])


def check_pixel_range(array: Tensor, name: str) -> None:
    low, high = (float(bound) for bound in array.aminmax())
    if not (low >= -SLACK and high <= 1 + SLACK):
        raise WireError("bad_media", f"{name!r}: got pixels from {low:g} to {high:g}, expected 0 to 1.")


def _file(frame: Tensor, codec: Literal["png", "webp"]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    # The fastest lossless setting of each: the file lives for one request.
    options: dict[str, Any] = {"compress_level": 1} if codec == "png" else {"lossless": True, "quality": 0, "method": 0}
    Image.fromarray(frame.contiguous().numpy()).save(file, codec.upper(), **options)
    return file.getvalue()


def unpacked(entry: Raw | Encoded, kind: MediaKind, *, where: str) -> Tensor:
    import torch

    if isinstance(entry, Raw):
        # Of a copy: torch warns of memory that cannot be written.
        return torch.frombuffer(bytearray(entry.data), dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
    frames: list[Tensor] = []
    for file in entry.files:
        image = _opened(file, entry.codec, where=where)
        try:
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        except Exception as error:  # As above: truncated or damaged pixels.
            raise WireError("bad_media", f"{where}: the {entry.codec} file is damaged: {_said(error)}.") from error
        frames.append(pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).float().div(255).contiguous())
    if len({frame.shape for frame in frames}) != 1:
        raise WireError("bad_media", f"{where}: the frames have several sizes, expected one.")
    return torch.stack(frames) if kind == "video" else frames[0]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}".rstrip(".")
