"""The wire format of reward services: what is sent arrives, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from unirl.core.errors import DataError
from unirl.core.roles import ScoreInput
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status
from unirl.numerics.media import LoadedImage, load_image
from unirl.reward_service.wire import (
    FORMAT,
    ScoreReply,
    ScoreRequest,
    Source,
    WireLimits,
    WireSamples,
    decode,
    encode,
    from_samples,
    read_request,
    to_samples,
    to_scores,
)
from unirl.reward_service.wire_pixels import Encoded, Raw, WireError, stated_size

LIMITS = WireLimits(max_samples=8, max_image_pixels=4096, max_request_pixels=8192)


def samples(count: int, **fields: Any) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(count))
    return ScoreInput(
        **{
            "sample_ids": names,
            "group_ids": ("g",) * count,
            "inputs": Inputs.of_texts([f"a prompt, the {n}th ✓" for n in range(count)]),
            "metadata": tuple({"answer": "42", "n": n, "deep": [{"x": None, "y": 1.5}]} for n in range(count)),
            **fields,
        }
    )


def pixels(*shape: int) -> torch.Tensor:
    """Whole 255ths, which 8 bits hold exactly."""
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(3)).float() / 255


SOURCES = [LoadedImage.of(pixels(3, 6, 4 + n), role=role) for n, role in enumerate(("source", "condition"))]
BATCHES = {
    "images": samples(3, media=Media(kind="image", values=pixels(3, 3, 5, 7))),
    "images of several sizes": samples(2, media=Media(kind="image", values=(pixels(3, 5, 7), pixels(3, 8, 2)))),
    "half images": samples(2, media=Media(kind="image", values=pixels(2, 3, 4, 4).half())),
    "videos": samples(2, media=Media(kind="video", values=pixels(2, 4, 3, 6, 5), rate=8.0)),
    "audio": samples(2, media=Media(kind="audio", values=pixels(2, 1, 50) - 0.5, rate=16000.0)),
    "texts": samples(
        2,
        media=Media(kind="text", values=("an answer", "half of \ud83d")),
        status=(Status.COMPLETED, Status.TRUNCATED),
        lengths=(3, 4),
    ),
    "no media": samples(2),
    "edits": samples(
        3,
        inputs=Inputs(
            ids=("a", "b", "a"),
            prompts=("x", "y", "z"),
            texts=("x", "y", "x"),
            media=((SOURCES[0], SOURCES[1]), (), (SOURCES[0], SOURCES[1])),
        ),
        media=Media(kind="image", values=pixels(3, 3, 5, 7)),
    ),
}


def body(batch: ScoreInput, *, codec: Any = "raw", **fields: Any) -> bytes:
    request = {"format": FORMAT, "id": "0123456789", "scorer": "x", "version": "", **fields}
    return encode(ScoreRequest(samples=from_samples(batch, codec=codec), **request))


@pytest.mark.parametrize("name", BATCHES)
def test_samples_arrive_as_they_were_sent(name: str) -> None:
    arrived = to_samples(read_request(body(BATCHES[name]), limits=LIMITS).samples)
    assert same(arrived, BATCHES[name])


@pytest.mark.parametrize("codec", ["png", "webp"])
@pytest.mark.parametrize("name", ["images", "images of several sizes", "videos", "edits"])
def test_image_files_keep_pixels_of_8_bits(name: str, codec: str) -> None:
    arrived = to_samples(read_request(body(BATCHES[name], codec=codec), limits=LIMITS).samples)
    assert same(arrived, BATCHES[name])


def test_pixels_that_a_file_would_hide_are_refused() -> None:
    for value in (float("nan"), 1.5, -0.1):
        bad = pixels(2, 3, 4, 4)
        bad[1, 2, 3, 3] = value
        with pytest.raises(WireError, match="'s1': got pixels from"):
            from_samples(samples(2, media=Media(kind="image", values=bad)), codec="png")


def of_media(*refs: tuple[MediaRef, ...], ids: str) -> Inputs:
    return Inputs(ids=tuple(ids), prompts=tuple(ids), texts=tuple(ids), media=refs)


@pytest.mark.parametrize("codec", ["raw", "png", "webp"])
def test_source_images_arrive_as_their_files_are_read_and_each_input_once(codec: Any, tmp_path: Path) -> None:
    """A photograph turned by its EXIF data, one with transparency, and grey of 16 bits, which image files round."""
    file, clear, grey = (tmp_path / name for name in ("turned.jpg", "clear.png", "grey.png"))
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.effect_noise((9, 5), 80).convert("RGB").save(file, exif=turned)
    Image.effect_noise((6, 6), 80).convert("RGBA").save(clear)
    Image.linear_gradient("L").resize((8, 8)).convert("I;16").point(lambda level: level * 200 + 7).save(grey)
    refs = [
        MediaRef(modality="image", role="source", uri=str(file)),
        MediaRef(modality="image", role="first_frame", uri=str(clear)),
    ]
    if codec == "raw":
        refs.append(MediaRef(modality="image", role="condition", uri=str(grey)))
    wire = from_samples(samples(3, inputs=of_media(tuple(refs), (), tuple(refs), ids="aba")), codec=codec)
    assert list(wire.sources) == ["a"] and len(wire.sources["a"]) == len(refs)
    request = ScoreRequest(format=FORMAT, id="0123456789", scorer="x", version="", samples=wire)
    assert str(tmp_path).encode() not in encode(request)
    first, none, again = to_samples(read_request(encode(request), limits=LIMITS).samples).inputs.media
    assert none == () and again == first
    assert [ref.role for ref in first] == [ref.role for ref in refs]
    for arrived, ref in zip(first, refs, strict=True):
        assert torch.equal(load_image(arrived), load_image(ref))


def test_inputs_that_are_no_images_or_cannot_be_read_are_refused(tmp_path: Path) -> None:
    video = MediaRef(modality="video", role="source", uri=str(tmp_path / "a.mp4"))
    with pytest.raises(WireError, match=r"input 'a' is made from video \('source'\), expected images alone"):
        from_samples(samples(1, inputs=of_media((video,), ids="a")), codec="raw")
    missing = MediaRef(modality="image", role="source", uri=str(tmp_path / "a.png"))
    with pytest.raises(DataError, match=r"a\.png' \(source\): it cannot be opened"):
        from_samples(samples(1, inputs=of_media((missing,), ids="a")), codec="raw")


def test_metadata_that_msgpack_lacks_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        body(samples(1, metadata=({"x": object()},)))


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG of RGB with this header, whatever its data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def file_of(mode: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (4, 4)).save(file, **{"format": "PNG", **options})
    return file.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (300, 17), (4000, 9)])
@pytest.mark.parametrize(
    "options",
    [
        {"format": "PNG"},
        {"format": "PNG", "icc_profile": bytes(200), "dpi": (72, 72)},
        {"format": "WEBP"},
        {"format": "WEBP", "lossless": True},
        {"format": "WEBP", "exif": bytes(20)},
    ],
)
def test_the_size_in_a_header_is_that_which_pillow_reads(size: tuple[int, int], options: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, **options)
    assert Image.open(io.BytesIO(file.getvalue())).size == size
    assert stated_size(file.getvalue(), options["format"].lower(), where="x") == size
    for end in range(20):
        with pytest.raises(WireError, match="its header cannot be read"):
            stated_size(file.getvalue()[:end], options["format"].lower(), where="x")


GOOD = file_of("RGB")
STATED = from_samples(BATCHES["images"], codec="png")


def with_source(entry: Raw | Encoded, name: str = "a") -> WireSamples:
    edits = from_samples(BATCHES["edits"], codec="png")
    return msgspec.structs.replace(edits, sources={**edits.sources, name: [Source(role="source", pixels=entry)]})


def with_entry(entry: Raw | Encoded) -> WireSamples:
    return msgspec.structs.replace(STATED, media=[*(STATED.media or ())[:2], entry])


@pytest.mark.parametrize(
    ("wire", "code", "message"),
    [
        (with_entry(Encoded(codec="png", files=[png(60000, 60000, b"")])), "too_large", "60000|decompression bomb"),
        (with_entry(Encoded(codec="png", files=[png(65, 64, b"")])), "too_large", "65 x 64 pixels, expected at most"),
        (with_entry(Encoded(codec="png", files=[png(64, 64, bytes(100))])), "bad_media", "damaged"),
        (with_entry(Encoded(codec="png", files=[GOOD[:-25]])), "bad_media", "damaged|not a png"),
        (with_entry(Encoded(codec="png", files=[b"GIF89a"])), "bad_media", "not a png file"),
        (with_entry(Encoded(codec="webp", files=[GOOD])), "bad_media", "not a webp file"),
        (with_entry(Encoded(codec="png", files=[file_of("RGBA")])), "bad_media", "1 frames of RGBA"),
        (with_entry(Encoded(codec="png", files=[GOOD, GOOD])), "bad_media", "2 image files for image"),
        (with_entry(Raw(dtype="float32", shape=[3, 4, 4], data=bytes(100))), "bad_media", "expected 192 bytes"),
        (with_entry(Raw(dtype="float32", shape=[4, 4], data=bytes(64))), "bad_media", "3 dims"),
        (with_entry(Raw(dtype="float32", shape=[4, 4, 4], data=bytes(256))), "bad_request", "Media.values of image"),
        (with_entry(Raw(dtype="float32", shape=[3, 2**40, 2**40], data=b"")), "bad_media", "got 0 bytes"),
        (with_source(Encoded(codec="png", files=[png(65, 64, b"")])), "too_large", r"sources\['a'\]\[0\]: got 65 x 64"),
        (with_source(Encoded(codec="png", files=[png(60000, 60000, b"")])), "too_large", "60000|decompression bomb"),
        (with_source(Encoded(codec="png", files=[GOOD, GOOD])), "bad_media", "2 image files for image"),
        (with_source(Encoded(codec="png", files=[GOOD[:-25]])), "bad_media", "damaged|not a png"),
        (with_source(Raw(dtype="float32", shape=[1, 4, 4], data=bytes(64))), "bad_request", "Media.values of image"),
        (
            with_source(Raw(dtype="float16", shape=[3, 1, 1], data=b"\0\x7e" * 3)),
            "bad_media",
            "'a': got pixels from nan",
        ),
        (with_source(Raw(dtype="float32", shape=[3, 4, 4], data=bytes(100))), "bad_media", "expected 192 bytes"),
        (with_source(STATED.media[0], name="c"), "bad_request", "samples.sources: got 'c', which no sample has"),
        (
            msgspec.structs.replace(
                with_source(Encoded(codec="png", files=[png(64, 64, b"")])),
                media=[Encoded(codec="png", files=[png(64, 32, b"")])] * 3,
            ),
            "too_large",
            "got 10240 pixels, expected at most 8192 in a request",
        ),
        (msgspec.structs.replace(STATED, prompts=[b"a"]), "bad_request", "samples.prompts: got 1 entries for 3"),
        (msgspec.structs.replace(STATED, prompts=[b"\xff"] * 3), "bad_request", "utf-8"),
        (msgspec.structs.replace(STATED, status=[0, 1, 9]), "bad_request", "9 is not a valid Status"),
        (msgspec.structs.replace(STATED, completions=[b"a"] * 3), "bad_request", "samples.completions: not expected"),
        (msgspec.structs.replace(STATED, media=None), "bad_request", "samples.media: missing"),
        (msgspec.structs.replace(STATED, kind="video"), "bad_request", "frames per second"),
        (from_samples(samples(9), codec="raw"), "too_large", "got 9, expected at most 8"),
        (
            from_samples(samples(3, media=Media(kind="image", values=pixels(3, 3, 64, 64))), codec="raw"),
            "too_large",
            "got 12288 pixels, expected at most 8192 in a request",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_does_not_fit_is_refused_by_name(wire: WireSamples, code: str, message: str) -> None:
    request = ScoreRequest(format=FORMAT, id="0123456789", scorer="x", version="", samples=wire)
    with pytest.raises(WireError, match=message) as error:
        to_samples(read_request(encode(request), limits=LIMITS).samples)
    assert error.value.code == code


def test_an_empty_request_another_format_and_a_wrong_id_are_refused() -> None:
    for changed, message in (
        (body(samples(0)), "got no samples"),
        (body(samples(1), format=1), "format: got 1, expected 2"),
        (body(samples(1), format=3).replace(b"metadata", b"whatever"), "format: got 3, expected 2"),
        (body(samples(1), id="../../etc"), r"matching regex .*\$\.id"),
        (body(samples(1)) + b"x", "trailing"),
        (b"", "not a valid ScoreRequest"),
        (b"\x91" * 100_000, "not a valid ScoreRequest"),
        (b"\xdd\xff\xff\xff\xff", "not a valid ScoreRequest"),
        (b"\xc7\x03\x05abc", "not a valid ScoreRequest"),
    ):
        with pytest.raises(WireError, match=message):
            read_request(changed, limits=LIMITS)


def test_metadata_nested_too_deep_is_refused() -> None:
    deep = b"\x91" * 50_000 + b"\xc0"
    start = body(samples(1, metadata=({"deep": None},)))
    key = b"\xa4deep"
    where = start.index(key) + len(key)
    with pytest.raises(WireError, match="not a valid ScoreRequest"):
        read_request(start[:where] + deep + start[where + 1 :], limits=LIMITS)


SEEDS = [body(batch, codec=codec) for batch in BATCHES.values() for codec in ("raw", "png", "webp")]


@settings(max_examples=600)
@given(st.data())
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_changed_bytes_are_read_or_refused_and_raise_nothing_else(data: st.DataObject) -> None:
    mutated = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        where = data.draw(st.integers(0, len(mutated)))
        piece = data.draw(st.binary(max_size=8))
        removed = data.draw(st.integers(0, 8))
        mutated[where : where + removed] = piece
    try:
        to_samples(read_request(bytes(mutated), limits=LIMITS).samples)
    except WireError:
        return


def reply(**fields: Any) -> ScoreReply:
    values = {"id": "r", "scorer": "x", "version": "v", "sample_ids": ["a", "b"], "values": [0.5, 1.0], "parts": {}}
    return ScoreReply(**{"format": FORMAT, **values, **fields})


def test_scores_arrive_with_their_parts_and_with_samples_that_have_none() -> None:
    sent = reply(parts={"p": [1.0, 2.0]}, scored=[True, False], values=[0.1, 0.0])
    scores = to_scores(decode(encode(sent), ScoreReply), sample_ids=("a", "b"), request_id="r")
    assert scores.values.dtype == torch.float32
    assert torch.equal(scores.values, torch.tensor([0.1, 0.0]))
    assert torch.equal(scores.parts["p"], torch.tensor([1.0, 2.0]))
    assert scores.scored is not None and scores.scored.tolist() == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": [0.5]}, "values: got 1 numbers for 2 samples"),
        ({"sample_ids": ["a"], "values": [0.5]}, "got scores of 1 samples, expected those of the 2"),
        ({"sample_ids": ["b", "a"]}, "another order"),
        ({"values": [0.5, float("nan")]}, "values: got nan for sample 'b'"),
        ({"parts": {"p": [1.0, float("inf")]}}, r"parts\['p'\]: got inf for sample 'b'"),
        ({"parts": {"p": [1.0]}}, r"parts\['p'\]: got 1 numbers"),
        ({"scored": [True]}, "scored: got 1 numbers"),
        ({"id": "other"}, "the reply to request 'other'"),
    ],
)
def test_a_reply_that_does_not_fit_the_samples_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        to_scores(reply(**fields), sample_ids=("a", "b"), request_id="r")


def test_a_reply_of_another_shape_is_refused() -> None:
    with pytest.raises(WireError, match="format: got 1, expected 2; update the older side"):
        decode(encode(reply(format=1)), ScoreReply)
    nested = msgspec.msgpack.encode({**msgspec.structs.asdict(reply()), "values": [[0.5], [1.0]]})
    with pytest.raises(WireError, match=r"\$.values"):
        decode(nested, ScoreReply)


def test_rows_of_any_status_survive() -> None:
    every = samples(len(Status), status=tuple(Status))
    assert to_samples(from_samples(every, codec="raw")).status == tuple(Status)
    assert dataclasses.replace(every, status=None).status is None
