"""Wire format of a reward service: samples to score and their scores, as msgpack. No pickle on either side.

Both ends use this file; reading and checking a request needs no torch. Pixels travel as raw tensor bytes, which keep
every bit, or as lossless PNG or WebP files of 8 bits a channel. Everything that is read is checked against a schema and
against `WireLimits` before any pixel is decoded; each failure is a `WireError`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from unirl.core.errors import BatchError
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media, MediaKind
from unirl.core.types.track import Status

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = [
    "FORMAT",
    "Codec",
    "Encoded",
    "Raw",
    "ScoreReply",
    "ScoreRequest",
    "Source",
    "WireError",
    "WireLimits",
    "WireSamples",
    "decode",
    "encode",
    "from_samples",
    "read_request",
    "to_samples",
    "to_scores",
]

FORMAT = 2
"""Version of the format; either side refuses any other."""
Codec = Literal["raw", "png", "webp"]
ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NUM_DIMS = {"image": 3, "video": 4, "audio": 2}
SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""

Text = bytes
"""UTF-8 with the lone surrogates that a detokenizer may leave, which a msgpack string cannot hold."""
Name = Annotated[str, msgspec.Meta(max_length=512)]
RequestId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
T = TypeVar("T", bound="_Message")


class WireError(ValueError):
    """Bytes that are not a valid message, or one past a limit."""

    def __init__(self, code: Literal["bad_request", "bad_media", "too_large"], message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Limits of one request, besides the size of its body."""

    max_samples: int = 1024
    max_image_pixels: int = 2**24
    """Height x width of an image or a frame."""
    max_request_pixels: int = 2**26
    """Of all images and frames of a request, those that samples are made from among them: what its body unpacks to."""


class Raw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="raw"):
    """The bytes of a tensor in C order, little-endian."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=4)]
    data: bytes


class Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="files"):
    """Image files: one for an image, one a frame for a video."""

    codec: Literal["png", "webp"]
    files: Annotated[list[bytes], msgspec.Meta(min_length=1)]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image that samples are made from."""

    role: Name
    pixels: Raw | Encoded


class WireSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `ScoreInput`: each list has one entry per sample."""

    sample_ids: list[Name]
    group_ids: list[Name]
    input_ids: list[Name]
    prompts: list[Text]
    texts: list[Text]
    metadata: list[dict[str, Any]]
    status: list[int] | None = None
    lengths: list[int] | None = None
    kind: Literal["image", "video", "text", "audio"] | None = None
    """Of the media; None for samples without."""
    rate: float | None = None
    media: list[Raw | Encoded] | None = None
    """None for texts, which are in `completions`."""
    completions: list[Text] | None = None
    sources: dict[Name, Annotated[list[Source], msgspec.Meta(min_length=1)]] = {}
    """Input id -> the images that its samples are made from, in order; an id without any is left out."""


class _Message(msgspec.Struct, frozen=True):
    """What a message of any format has."""

    format: int


class ScoreRequest(_Message, frozen=True, forbid_unknown_fields=True):
    id: RequestId
    """Of the request; a retry has the same one, and the same bytes."""
    scorer: Name
    """Name of the scorer at the service."""
    version: Name
    """Version of the scorer that is expected; empty takes any."""
    samples: WireSamples


class ScoreReply(_Message, frozen=True, forbid_unknown_fields=True):
    id: str
    scorer: str
    version: str
    """Of the scorer that gave these scores."""
    sample_ids: list[str]
    values: list[float]
    parts: dict[str, list[float]]
    scored: list[bool] | None = None
    """See `unirl.core.roles.Scores.scored`; the values of samples without a score are 0."""


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack. Raises WireError for values that msgpack does not have, such as those of metadata."""
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError("bad_request", f"a value cannot be sent: {error}") from error


def decode(data: bytes, kind: type[T]) -> T:
    """The message of these bytes. Raises WireError, with the path of the field, for anything that is not one."""
    try:
        # First, since another format may have other fields.
        given = msgspec.msgpack.decode(data, type=_Message).format
        if given == FORMAT:
            return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("bad_request", f"not a valid {kind.__name__}: {error}") from error
    raise WireError("bad_request", f"format: got {given}, expected {FORMAT}; update the older side.")


def read_request(body: bytes, *, limits: WireLimits) -> ScoreRequest:
    """A request whose schema, sizes and limits have been checked; no pixel has been decoded.

    Raises WireError: `bad_request`, `bad_media` for image files whose header cannot be read, `too_large`.
    """
    request = decode(body, ScoreRequest)
    samples = request.samples
    count = len(samples.sample_ids)
    if not count:
        raise WireError("bad_request", "samples.sample_ids: got no samples, expected one or more.")
    if count > limits.max_samples:
        raise WireError("too_large", f"samples: got {count}, expected at most {limits.max_samples} in a request.")
    others = ("kind", "rate", "sources")
    lists = {name: getattr(samples, name) for name in WireSamples.__struct_fields__ if name not in others}
    for name, entries in lists.items():
        if entries is not None and len(entries) != count:
            raise WireError("bad_request", f"samples.{name}: got {len(entries)} entries for {count} samples.")
    expected = {None: (None, None), "text": (None, True)}.get(samples.kind, (True, None))
    for name, has in zip(("media", "completions"), expected, strict=True):
        if (lists[name] is not None) != bool(has):
            state = "missing" if has else "not expected"
            raise WireError("bad_request", f"samples.{name}: {state} with kind {samples.kind!r}.")
    if unknown := samples.sources.keys() - set(samples.input_ids):
        raise WireError("bad_request", f"samples.sources: got {min(unknown)!r}, which no sample has as its input id.")
    _check_pixels(samples, limits)
    return request


def from_samples(samples: ScoreInput, *, codec: Codec) -> WireSamples:
    """The samples in wire format, with the pixels of the images that they are made from, once for each input id.

    codec: of images and videos; `png` and `webp` round pixels to 8 bits.
    Raises WireError for samples that are made from other media, and for pixels that are not finite or not in [0, 1]
    where they would be rounded; DataError for an image file that cannot be read.
    """
    given = dict(zip(samples.inputs.ids, samples.inputs.media, strict=True))
    media = samples.media
    entries: list[Raw | Encoded] | None = None
    if media is not None and media.kind != "text":
        names = zip(samples.sample_ids, media.arrays, strict=True)
        entries = [_packed(array, media.kind, codec=codec, name=name) for name, array in names]
    return WireSamples(
        sample_ids=list(samples.sample_ids),
        group_ids=list(samples.group_ids),
        input_ids=list(samples.inputs.ids),
        prompts=[_to_text(text) for text in samples.inputs.prompts],
        texts=[_to_text(text) for text in samples.inputs.texts],
        metadata=[dict(metadata) for metadata in samples.metadata],
        status=None if samples.status is None else [int(status) for status in samples.status],
        lengths=None if samples.lengths is None else list(samples.lengths),
        kind=None if media is None else media.kind,
        rate=None if media is None else media.rate,
        media=entries,
        completions=[_to_text(text) for text in media.texts] if media is not None and media.kind == "text" else None,
        sources={name: _sent(name, refs, codec) for name, refs in given.items() if refs},
    )


def to_samples(wire: WireSamples) -> ScoreInput:
    """The samples of a checked request; images of one size are one tensor. Those that samples are made from are
    references that `unirl.numerics.media.load_image` reads like any other.

    Raises WireError: `bad_media` for a file that is truncated, damaged or not RGB, `bad_request` for the rest.
    """
    try:
        sources = {name: _received(name, images) for name, images in wire.sources.items()}
        return ScoreInput(
            sample_ids=tuple(wire.sample_ids),
            group_ids=tuple(wire.group_ids),
            inputs=Inputs(
                ids=tuple(wire.input_ids),
                prompts=tuple(_from_text(text) for text in wire.prompts),
                texts=tuple(_from_text(text) for text in wire.texts),
                media=tuple(sources.get(name, ()) for name in wire.input_ids),
            ),
            metadata=tuple(wire.metadata),
            media=_media(wire),
            status=None if wire.status is None else tuple(Status(status) for status in wire.status),
            lengths=None if wire.lengths is None else tuple(wire.lengths),
        )
    except WireError:
        raise
    except (BatchError, ValueError) as error:
        raise WireError("bad_request", f"samples: {error}") from error


def to_scores(reply: ScoreReply, *, sample_ids: Sequence[str], request_id: str) -> Scores:
    """The scores of a reply, checked against the samples that were sent.

    Raises WireError for another request's reply, too few scores, another order, and values that are not finite.
    """
    if reply.id != request_id:
        raise WireError("bad_request", f"got the reply to request {reply.id!r}, expected {request_id!r}.")
    if reply.sample_ids != list(sample_ids):
        result, count = len(reply.sample_ids), len(sample_ids)
        what = "other samples or another order" if result == count else f"scores of {result} samples"
        raise WireError("bad_request", f"got {what}, expected those of the {count} samples that were sent, in order.")
    count = len(sample_ids)
    columns = {"values": reply.values, **{f"parts[{name!r}]": column for name, column in reply.parts.items()}}
    scored = [True] * count if reply.scored is None else reply.scored
    for name, column in {**columns, "scored": scored}.items():
        if len(column) != count:
            raise WireError("bad_request", f"{name}: got {len(column)} numbers for {count} samples.")
    for name, column in columns.items():
        for row, value in enumerate(column):
            if scored[row] and not math.isfinite(value):
                raise WireError(
                    "bad_request", f"{name}: got {value} for sample {sample_ids[row]!r}, expected a number."
                )
    import torch

    return Scores(
        values=torch.tensor(reply.values, dtype=torch.float32),
        parts={name: torch.tensor(column, dtype=torch.float32) for name, column in reply.parts.items()},
        scored=None if reply.scored is None else torch.tensor(reply.scored, dtype=torch.bool),
    )


def _check_pixels(samples: WireSamples, limits: WireLimits) -> None:
    total = 0
    entries = [(f"samples.media[{row}]", str(samples.kind), entry) for row, entry in enumerate(samples.media or ())]
    for name, images in samples.sources.items():
        entries += [(f"samples.sources[{name!r}][{place}]", "image", one.pixels) for place, one in enumerate(images)]
    for where, kind, entry in entries:
        if isinstance(entry, Raw):
            size = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
            if len(entry.shape) != NUM_DIMS[kind] or len(entry.data) != size:
                raise WireError(
                    "bad_media",
                    f"{where}: got {len(entry.data)} bytes for {entry.dtype} {entry.shape}, expected {size} bytes and "
                    f"{NUM_DIMS[kind]} dims ({kind}).",
                )
            sizes = [] if kind == "audio" else [(entry.shape[-1], entry.shape[-2])]
            sizes *= entry.shape[0] if kind == "video" else 1
        elif kind == "audio" or (kind == "image" and len(entry.files) != 1):
            raise WireError("bad_media", f"{where}: got {len(entry.files)} image files for {kind}.")
        else:
            sizes = [_opened(file, entry.codec, where=where).size for file in entry.files]
        for width, height in sizes:
            total += width * height
            if width * height > limits.max_image_pixels:
                raise WireError(
                    "too_large",
                    f"{where}: got {width} x {height} pixels, expected at most {limits.max_image_pixels} in an image.",
                )
    if total > limits.max_request_pixels:
        raise WireError(
            "too_large",
            f"samples: got {total} pixels, expected at most {limits.max_request_pixels} in a request; send fewer "
            "samples in one.",
        )


def _sent(name: str, refs: Sequence[MediaRef], codec: Codec) -> list[Source]:
    from unirl.numerics.media import load_image

    for ref in refs:
        if ref.modality != "image":
            raise WireError(
                "bad_request",
                f"input {name!r} is made from {ref.modality} ({ref.role!r}), expected images alone. Score it in the "
                "run's own process.",
            )
    return [Source(role=ref.role, pixels=_packed(load_image(ref), "image", codec=codec, name=name)) for ref in refs]


def _received(name: str, images: Sequence[Source]) -> tuple[MediaRef, ...]:
    from unirl.numerics.media import LoadedImage

    pixels = [_unpacked(one.pixels, "image", where=f"samples.sources[{name!r}][{n}]") for n, one in enumerate(images)]
    Media(kind="image", values=tuple(pixels))
    for array in pixels:
        _check_range(array, name)
    return tuple(LoadedImage.of(a.float(), role=one.role) for a, one in zip(pixels, images, strict=True))


def _opened(file: bytes, codec: str, *, where: str) -> Image:
    """The image with its header read, and its pixels not yet."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(file), formats=[codec.upper()])
        frames = int(getattr(image, "n_frames", 1))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise WireError("too_large", f"{where}: {_said(error)}.") from error
    except Exception as error:  # Whatever a decoder makes of hostile bytes: SyntaxError, struct.error, and more.
        raise WireError("bad_media", f"{where}: not a {codec} file: {_said(error)}.") from error
    if frames != 1 or image.mode != "RGB":
        raise WireError("bad_media", f"{where}: got {frames} frames of {image.mode}, expected one of RGB, 8 bits each.")
    return image


def _media(wire: WireSamples) -> Media | None:
    if wire.kind is None:
        return None
    if wire.kind == "text":
        assert wire.completions is not None
        return Media(kind="text", values=tuple(_from_text(text) for text in wire.completions))
    import torch

    assert wire.media is not None
    arrays = tuple(_unpacked(entry, wire.kind, where=f"samples.media[{row}]") for row, entry in enumerate(wire.media))
    is_stackable = len({(array.shape, array.dtype) for array in arrays}) == 1
    return Media(kind=wire.kind, values=torch.stack(arrays) if is_stackable else arrays, rate=wire.rate)


def _packed(array: Tensor, kind: MediaKind, *, codec: Codec, name: str) -> Raw | Encoded:
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
    _check_range(array, name)
    frames = array if kind == "video" else array[None]
    bytes_of = frames.float().mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return Encoded(codec=codec, files=[_file(frame, codec) for frame in bytes_of])


def _check_range(array: Tensor, name: str) -> None:
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


def _unpacked(entry: Raw | Encoded, kind: MediaKind, *, where: str) -> Tensor:
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


def _to_text(text: str) -> Text:
    return text.encode("utf-8", "surrogatepass")


def _from_text(text: Text) -> str:
    return text.decode("utf-8", "surrogatepass")
