"""Reading media: pixels exactly, and one clear sentence for every file that cannot be read."""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from unirl.core.errors import BatchError, DataError, DiskFull
from unirl.core.types.data import MediaRef
from unirl.core.types.media import Media
from unirl.numerics import media
from unirl.numerics.media import load_image, load_video, save_images

av = pytest.importorskip("av")

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def ref(path: Path | str, modality: str = "image") -> MediaRef:
    return MediaRef(modality=modality, role="source", uri=str(path))


def planes(pixels: Any, largest: int = 255) -> torch.Tensor:
    return torch.from_numpy(np.asarray(pixels, dtype=np.float32) / np.float32(largest)).permute(2, 0, 1)


def test_pixels_come_exactly(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    assert torch.equal(load_image(ref(tmp_path / "a.png")), planes(PIXELS))
    grey = PIXELS[..., 0]
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert torch.equal(load_image(ref(tmp_path / "grey.png")), planes(np.stack([grey] * 3, axis=2)))
    deep = (PIXELS[..., 0].astype(np.uint16) << 8) + PIXELS[..., 1]
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert torch.equal(load_image(ref(tmp_path / "deep.png")), planes(np.stack([deep] * 3, axis=2), 65535))


def test_a_url_is_read_as_a_path_is(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    assert torch.equal(load_image(ref(f"file://{tmp_path / 'a.png'}")), planes(PIXELS))


def test_orientation_is_applied_and_transparency_lies_on_white(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # "The 0th row is the right-hand side": turned by 90 degrees to the left when stored.
    Image.fromarray(PIXELS).save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(load_image(ref(tmp_path / "turned.png")), planes(np.rot90(PIXELS, -1).copy()))
    clear = np.concatenate([PIXELS, np.zeros((6, 9, 1), dtype=np.uint8)], axis=2)
    clear[0, 0, 3] = 255
    Image.fromarray(clear).save(tmp_path / "clear.png")
    result = load_image(ref(tmp_path / "clear.png"))
    assert torch.equal(result[:, 0, 0], planes(PIXELS)[:, 0, 0])
    assert bool((result.flatten(1)[:, 1:] == 1).all())


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("1", 1, (1, 1, 1)),
        ("L", 51, (0.2, 0.2, 0.2)),
        ("LA", (51, 0), (1, 1, 1)),
        ("P", 0, (0, 0, 0)),
        ("RGBA", (255, 0, 0, 255), (1, 0, 0)),
        ("I;16", 13107, (0.2, 0.2, 0.2)),
        # Inks absorb: cyan leaves no red, and black leaves nothing.
        ("CMYK", (255, 0, 0, 0), (0, 1, 1)),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
    ],
)
def test_images_of_every_mode_have_three_planes(tmp_path: Path, mode: str, pixel: Any, expected: Any) -> None:
    Image.new(mode, (4, 2), pixel).save(tmp_path / "a.tiff")
    result = load_image(ref(tmp_path / "a.tiff"))
    # 13107 / 65535 and 51 / 255 are 0.2 up to the rounding of fp32.
    torch.testing.assert_close(result, torch.tensor(expected).float()[:, None, None].expand(3, 2, 4))


def cmyk_profile() -> bytes:
    """A profile in which black ink alone counts: L* is 100 without it and 0 with it, a* and b* are 0."""

    def text(kind: bytes, content: bytes) -> bytes:
        return kind + bytes(4) + content

    corners = [(0 if number % 2 else 255, 128, 128) for number in range(16)]
    lut = text(b"mft1", bytes((4, 3, 2, 0))) + struct.pack(">9i", *(0x10000 * (n % 4 == 0) for n in range(9)))
    lut += bytes(range(256)) * 4 + bytes(value for corner in corners for value in corner) + bytes(range(256)) * 3
    white = text(b"XYZ ", struct.pack(">3i", 63190, 65536, 54061))
    description = text(b"desc", struct.pack(">I", 2) + b"k\0" + bytes(78))
    tags = {b"desc": description, b"cprt": text(b"text", b"none\0"), b"wtpt": white, b"A2B0": lut}
    table, data, start = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">2I", start + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    header = (
        struct.pack(">I", start + len(data)) + bytes(4) + struct.pack(">I", 0x02400000) + b"prtrCMYKLab " + bytes(12)
    )
    header += b"acsp" + bytes(28) + struct.pack(">3i", 63190, 65536, 54061)
    return header.ljust(128, b"\0") + table + data


def test_cmyk_is_converted_by_the_profile_of_the_file(tmp_path: Path) -> None:
    for name, profile, expected in (("a", cmyk_profile(), 1), ("b", None, 0)):
        Image.new("CMYK", (4, 2), (255, 255, 255, 0)).save(tmp_path / f"{name}.tiff", icc_profile=profile)
        # Colour management rounds to 8 bits.
        torch.testing.assert_close(
            load_image(ref(tmp_path / f"{name}.tiff")), torch.full((3, 2, 4), float(expected)), atol=2 / 255, rtol=0
        )
    Image.new("CMYK", (4, 2)).save(tmp_path / "c.tiff", icc_profile=b"no profile")
    with pytest.raises(DataError, match="its CMYK colour profile cannot be applied"):
        load_image(ref(tmp_path / "c.tiff"))


def write_video(path: Path, frames: Any, *, rate: Fraction) -> None:
    """FFV1 keeps every bit of RGB frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())


def test_frames_come_exactly_and_with_their_rate(tmp_path: Path) -> None:
    frames = np.random.default_rng(1).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    write_video(tmp_path / "a.mkv", frames, rate=Fraction(12))
    result, rate = load_video(ref(tmp_path / "a.mkv", "video"))
    assert rate == 12
    assert torch.equal(result, torch.stack([planes(pixels) for pixels in frames]))


def animated(path: Path) -> None:
    stills = [Image.fromarray(PIXELS + shade) for shade in range(3)]
    stills[0].save(path, save_all=True, append_images=stills[1:])


def cut_off(path: Path) -> None:
    whole = path.with_suffix(".whole.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole)
    path.write_bytes(whole.read_bytes()[:2000])


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("absent.png", lambda path: None, "it cannot be opened: .*No such file"),
    ("text.png", lambda path: path.write_text("no image"), "not an image in a format that Pillow reads"),
    ("empty.png", lambda path: path.write_bytes(b""), "not an image in a format that Pillow reads"),
    ("cut.png", cut_off, "the image is broken"),
    ("moving.gif", animated, "got an animation of 3 frames, expected a single image"),
    ("large.png", lambda path: Image.new("1", (9000, 9000)).save(path), "got 9000 x 9000 pixels, the limit is"),
    ("float.tiff", lambda path: Image.new("F", (4, 4), 0.5).save(path), "floating-point numbers of no stated range"),
]


@pytest.mark.parametrize(("name", "write", "reply"), BAD, ids=[name for name, _, _ in BAD])
def test_an_image_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, write: Callable[[Path], object], reply: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError, match=f"^media '{re.escape(str(tmp_path / name))}' \\(source\\): .*{reply}"):
        load_image(ref(tmp_path / name))


def test_media_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    (tmp_path / "text.mp4").write_text("no video")
    write_video(tmp_path / "a.mkv", np.zeros((3, 16, 16, 3), dtype=np.uint8), rate=Fraction(8))
    with pytest.raises(DataError, match="modality 'video', expected 'image'"):
        load_image(ref(tmp_path / "a.mkv", "video"))
    with pytest.raises(DataError, match="modality 'image', expected 'video'"):
        load_video(ref(tmp_path / "a.png"))
    with pytest.raises(DataError, match=r"got a picture \(.*\), expected a video"):
        load_video(ref(tmp_path / "a.png", "video"))
    with pytest.raises(DataError, match="the video is broken"):
        load_video(ref(tmp_path / "text.mp4", "video"))
    monkeypatch.setattr(media, "MAX_FRAMES", 2)
    with pytest.raises(DataError, match="more than 2 frames"):
        load_video(ref(tmp_path / "a.mkv", "video"))


def test_saved_images_come_back_rounded_to_8_bits(tmp_path: Path) -> None:
    images = torch.rand((3, 3, 5, 7), generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    refs = save_images(Media(kind="image", values=images), tmp_path / "new", role="source")
    levels = np.rint(np.clip(images.numpy(), 0, 1) * np.float32(255)).astype(np.uint8)
    for (saved,), expected in zip(refs, levels, strict=True):
        assert (saved.modality, saved.role) == ("image", "source")
        assert np.array_equal(np.asarray(Image.open(saved.uri)), expected.transpose(1, 2, 0))
        assert torch.equal(load_image(saved), planes(expected.transpose(1, 2, 0)))


def test_equal_images_share_a_file_and_other_shapes_of_the_same_pixels_do_not(tmp_path: Path) -> None:
    wide, tall, other = torch.zeros((3, 2, 8)), torch.zeros((3, 4, 4)), torch.ones((3, 2, 8))
    # Less than half of a level apart.
    close = wide + 0.4 / 255
    refs = save_images(Media(kind="image", values=(wide, tall, other, close, wide)), tmp_path, role="source")
    names = [saved.uri for (saved,) in refs]
    assert names[0] == names[3] == names[4] and len(set(names)) == 3
    assert sorted(map(str, tmp_path.iterdir())) == sorted(set(names)), "and nothing half-written"


def test_pixels_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    images = torch.zeros((2, 3, 4, 4))
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(BatchError, match=r"source image 1: got pixels that are not finite"):
        save_images(Media(kind="image", values=images), tmp_path, role="source")


def test_samples_without_images_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="source: got text, expected images"):
        save_images(Media(kind="text", values=("a",)), tmp_path, role="source")
    with pytest.raises(BatchError, match="source: got samples without media, expected images"):
        save_images(None, tmp_path, role="source")


def test_an_image_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Image.Image, file: Path, **options: Any) -> None:
        file.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(DiskFull, match=r"\.png: could not be written: No space left"):
        save_images(Media(kind="image", values=torch.zeros(1, 3, 4, 4)), tmp_path / "new", role="source")
    assert list((tmp_path / "new").iterdir()) == []
