"""Wire format of a reward service: samples to score and their scores, as msgpack. No pickle on either side.

Both ends use this file; reading and checking a request needs no torch. Pixels travel as raw tensor bytes, which keep
every bit, or as lossless PNG or WebP files of 8 bits a channel. Everything that is read is checked against a schema and
against `WireLimits` before any pixel is decoded; each failure is a `WireError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from unirl.core.errors import BatchError
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status

from .wire_pixels import (
    ITEM_BYTES,
    Codec,
    Encoded,
    Raw,
    WireError,
    check_pixel_range,
    packed,
    stated_size,
    unpacked,
)

__all__ = [
    "FORMAT",
    "ScoreReply",
    "ScoreRequest",
    "Source",
    "WireLimits",
    "WireSamples",
    "decode",
    "encode",
    "from_samples",
    "read_request",
    "sendable",
    "to_samples",
    "to_scores",
]

FORMAT = 2
"""Version of the format; either side refuses any other."""
NUM_DIMS = {"image": 3, "video": 4, "audio": 2}

Text = bytes
"""UTF-8 with the lone surrogates that a detokenizer may leave, which a msgpack string cannot hold."""
Name = Annotated[str, msgspec.Meta(max_length=512)]
RequestId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
T = TypeVar("T", bound="_Message")
Rows = msgspec.Meta(max_length=2**16)
"""Checked before any entry is read, as the limits of a service cannot be."""
LONGEST_TEXT = 4000
"""Characters of an error's message."""


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Limits of one request, besides the size of its body."""

    max_samples: int = 1024
    max_image_pixels: int = 2**24
    """Height x width of an image or a frame."""
    max_request_pixels: int = 2**26
    """Pixels of all images and frames of a request, sources of its samples included: what its body unpacks to."""
    max_request_frames: int = 8192
    """Images and frames of a request, sources included."""
    max_metadata_bytes: int = 4_000_000
    """Metadata of all samples of a request."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image that samples are made from."""

    role: Name
    pixels: Raw | Encoded


class WireSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `ScoreInput`: each list has one entry per sample."""

    sample_ids: Annotated[list[Name], Rows]
    group_ids: Annotated[list[Name], Rows]
    input_ids: Annotated[list[Name], Rows]
    prompts: Annotated[list[Text], Rows]
    texts: Annotated[list[Text], Rows]
    metadata: Annotated[list[msgspec.Raw], Rows]
    """A map each, read by the scorer: a byte of it may become an object of sixty."""
    status: Annotated[list[int], Rows] | None = None
    lengths: Annotated[list[int], Rows] | None = None
    kind: Literal["image", "video", "text", "audio"] | None = None
    """Kind of the media; None for samples without."""
    rate: float | None = None
    media: Annotated[list[Raw | Encoded], Rows] | None = None
    """None for texts, which are in `completions`."""
    completions: Annotated[list[Text], Rows] | None = None
    sources: Annotated[dict[Name, Annotated[list[Source], msgspec.Meta(min_length=1, max_length=1024)]], Rows] = {}
    """Input id -> the images that its samples are made from, in order; an id without any is left out."""


class _Message(msgspec.Struct, frozen=True):
    """Fields of messages of every format."""

    format: int


class ScoreRequest(_Message, frozen=True, forbid_unknown_fields=True):
    id: RequestId
    """Id of the request; a retry has the same one, and the same bytes."""
    scorer: Name
    """Name of the scorer at the service."""
    version: Name
    """Version of the scorer that is expected; empty takes any."""
    samples: WireSamples


class ScoreReply(_Message, frozen=True, forbid_unknown_fields=True):
    id: str
    scorer: str
    version: str
    """Version of the scorer that gave these scores."""
    sample_ids: list[str]
    values: list[float]
    parts: dict[str, list[float]]
    scored: list[bool] | None = None
    """See `unirl.core.roles.Scores.scored`; the values of samples without a score are 0."""


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack. Raises WireError for values that msgpack does not have, such as those of metadata."""
    return _encoded(message)


def _encoded(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
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


def sendable(text: str) -> str:
    """The text as messages and replies can hold it: lone surrogates are escaped, and its end is cut off."""
    return text[:LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


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
    size = sum(memoryview(entry).nbytes for entry in samples.metadata)
    if size > limits.max_metadata_bytes:
        raise WireError(
            "too_large",
            f"samples.metadata: got {size} bytes, expected at most {limits.max_metadata_bytes}; send fewer samples in "
            "one, or raise `max_metadata_mb` of the service.",
        )
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
        names = zip(samples.sample_ids, media.stored, strict=True)
        entries = [packed(array, media.kind, codec=codec, name=name) for name, array in names]
    return WireSamples(
        sample_ids=list(samples.sample_ids),
        group_ids=list(samples.group_ids),
        input_ids=list(samples.inputs.ids),
        prompts=[_to_text(text) for text in samples.inputs.prompts],
        texts=[_to_text(text) for text in samples.inputs.texts],
        metadata=[msgspec.Raw(_encoded(dict(metadata))) for metadata in samples.metadata],
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
            metadata=tuple(msgspec.msgpack.decode(entry, type=dict[str, Any]) for entry in wire.metadata),
            media=_media(wire),
            status=None if wire.status is None else tuple(Status(status) for status in wire.status),
            lengths=None if wire.lengths is None else tuple(wire.lengths),
        )
    except WireError:
        raise
    except (BatchError, ValueError, msgspec.MsgspecError, RecursionError) as error:
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
    num_pixels = num_frames = 0
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
            count = {"video": entry.shape[0], "audio": 0}.get(kind, 1)
        elif kind == "audio" or (kind == "image" and len(entry.files) != 1):
            raise WireError("bad_media", f"{where}: got {len(entry.files)} image files for {kind}.")
        else:
            count = len(entry.files)
        num_frames += count
        if num_frames > limits.max_request_frames:
            raise WireError(
                "too_large",
                f"samples: got more than {limits.max_request_frames} images and frames, expected at most as many in a "
                "request; send fewer samples in one.",
            )
        if isinstance(entry, Raw):
            sizes, times = [(entry.shape[-1], entry.shape[-2])][:count], count
        else:
            sizes, times = [stated_size(file, entry.codec, where=where) for file in entry.files], 1
        for width, height in sizes:
            num_pixels += width * height * times
            if width * height > limits.max_image_pixels:
                raise WireError(
                    "too_large",
                    f"{where}: got {width} x {height} pixels, expected at most {limits.max_image_pixels} in an image.",
                )
    if num_pixels > limits.max_request_pixels:
        raise WireError(
            "too_large",
            f"samples: got {num_pixels} pixels, expected at most {limits.max_request_pixels} in a request; send fewer "
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
    return [Source(role=ref.role, pixels=packed(load_image(ref), "image", codec=codec, name=name)) for ref in refs]


def _received(name: str, images: Sequence[Source]) -> tuple[MediaRef, ...]:
    from unirl.numerics.media import LoadedImage

    pixels = [unpacked(one.pixels, "image", where=f"samples.sources[{name!r}][{n}]") for n, one in enumerate(images)]
    pixels = Media(kind="image", values=tuple(pixels)).arrays
    for array in pixels:
        check_pixel_range(array, name)
    return tuple(LoadedImage.of(a.float(), role=one.role) for a, one in zip(pixels, images, strict=True))


def _media(wire: WireSamples) -> Media | None:
    if wire.kind is None:
        return None
    if wire.kind == "text":
        assert wire.completions is not None
        return Media(kind="text", values=tuple(_from_text(text) for text in wire.completions))
    import torch

    assert wire.media is not None
    arrays = tuple(unpacked(entry, wire.kind, where=f"samples.media[{row}]") for row, entry in enumerate(wire.media))
    is_stackable = len({(array.shape, array.dtype) for array in arrays}) == 1
    return Media(kind=wire.kind, values=torch.stack(arrays) if is_stackable else arrays, rate=wire.rate)


def _to_text(text: str) -> Text:
    return text.encode("utf-8", "surrogatepass")


def _from_text(text: Text) -> str:
    return text.decode("utf-8", "surrogatepass")
