"""Media: what each kind may hold, and how their rows are taken and joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unirl.core.errors import BatchError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.batch import same
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media, spread

RAGGED = {
    "image": tuple(torch.rand(3, size, 2) for size in (1, 4, 2)),
    "video": tuple(torch.rand(frames, 3, 2, 2) for frames in (1, 4, 2)),
    "audio": tuple(torch.rand(2, length) for length in (1, 4, 2)),
    "text": ("", "b", "c"),
}
STACKED = {
    "image": torch.rand(3, 3, 4, 2),
    "video": torch.rand(3, 5, 3, 2, 2),
    "audio": torch.rand(3, 1, 9),
}


@pytest.mark.parametrize(("kind", "values"), [*RAGGED.items(), *STACKED.items()])
def test_rows_of_every_kind_are_taken_and_joined(kind: Any, values: Any) -> None:
    media = Media(kind=kind, values=values, rate=8.0 if kind == "video" else None)
    assert len(media) == 3
    turned = media.select([2, 0, 1])
    assert same(turned.values[0], values[2]) and same(turned.values[1], values[0])
    assert same(Media.concat([media.select([0]), media.select([1, 2])]), media)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "smell", "values": ("a",)}, "kind: got 'smell', expected one of image, video, audio, text"),
        (
            {"kind": "image", "values": torch.rand(3, 4, 4)},
            r"got torch.float32 \[3, 4, 4\], expected a floating or uint8 .*\[N, 3, H, W\]",
        ),
        ({"kind": "image", "values": torch.rand(2, 1, 4, 4)}, r"\[N, 3, H, W\]"),
        ({"kind": "image", "values": torch.zeros(2, 3, 4, 4, dtype=torch.int64)}, "got torch.int64"),
        ({"kind": "audio", "values": torch.zeros(2, 1, 9, dtype=torch.uint8)}, "got torch.uint8"),
        (
            {"kind": "image", "values": (torch.rand(3, 4, 4), torch.rand(1, 4, 4))},
            r"\[1, 4, 4\] in row 1, .*\[3, H, W\]",
        ),
        ({"kind": "video", "values": torch.rand(2, 3, 5, 4, 4), "rate": 8.0}, r"\[N, F, 3, H, W\]"),
        ({"kind": "image", "values": ("a.png",)}, r"got str in row 0"),
        ({"kind": "text", "values": ["a", "b"]}, "got list, expected a tuple of strings"),
        ({"kind": "text", "values": ("a", 2)}, "got int in row 1, expected a tuple of strings"),
        ({"kind": "image", "values": torch.rand(2, 3, 4, 4), "rate": 8.0}, "rate: got 8.0 for image"),
        ({"kind": "video", "values": torch.rand(2, 5, 3, 4, 4), "rate": 0.0}, "rate: got 0.0 for video"),
        ({"kind": "video", "values": torch.rand(2, 5, 3, 4, 4)}, "rate: got none for video"),
    ],
)
def test_media_of_another_form_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Media(**fields)


def test_media_of_two_kinds_or_rates_are_not_joined() -> None:
    videos = [Media(kind="video", values=torch.rand(1, 2, 3, 4, 4), rate=rate) for rate in (8.0, 16.0)]
    with pytest.raises(BatchError, match=r"Media.rate: piece 0 has 8.0, piece 1 has 16.0"):
        Media.concat(videos)
    with pytest.raises(BatchError, match=r"Media.kind"):
        Media.concat([videos[0], Media(kind="image", values=torch.rand(1, 3, 4, 4))])


def test_media_are_read_as_what_they_are() -> None:
    ragged = Media(kind="image", values=(torch.rand(3, 4, 4), torch.rand(3, 2, 4)))
    with pytest.raises(BatchError, match="images of sizes"):
        _ = ragged.stacked
    with pytest.raises(BatchError, match="got image, expected text"):
        _ = ragged.texts
    with pytest.raises(BatchError, match="got text, expected image"):
        _ = Media(kind="text", values=("a",)).arrays
    alike = Media(kind="image", values=tuple(STACKED["image"]))
    assert same(alike.stacked, STACKED["image"])


def test_a_reward_asks_for_the_kind_that_it_scores() -> None:
    fields: dict[str, Any] = {
        "sample_ids": ("a",),
        "group_ids": ("g",),
        "inputs": Inputs.of_texts(["p"]),
        "metadata": ({},),
    }
    images = Media(kind="image", values=torch.rand(1, 3, 2, 2))
    assert ScoreInput(**fields, media=images).of("image", reward="x") is images
    with pytest.raises(RewardFailed, match=r"reward\.x: got image, expected video\."):
        ScoreInput(**fields, media=images).of("video", reward="x")
    with pytest.raises(RewardFailed, match=r"reward\.x: got samples without media, expected image\. Set sampling\.dec"):
        ScoreInput(**fields).of("image", reward="x")


def test_some_frames_of_a_video_have_the_rate_that_is_left() -> None:
    videos = torch.rand(2, 9, 3, 2, 2)
    for values in (videos, tuple(videos)):
        media = Media(kind="video", values=values, rate=8.0)
        chosen = media.with_frames(lambda count: [0, 4, count - 1])
        # Three frames span the second that nine did.
        assert same(chosen.stacked, videos[:, [0, 4, 8]]) and chosen.rate == 2.0
        assert media.with_frames(lambda count: [5, 6]).rate == media.with_frames(lambda count: [3]).rate == 8.0
        assert media.with_frames(lambda count: None) is media
        for places in ([], [9], [-1, 0], [2, 1], [1, 1]):
            with pytest.raises(BatchError, match=r"Media: got frames .*, expected some of 9, each once and in order"):
                media.with_frames(lambda count, places=places: places)
    images = Media(kind="image", values=torch.rand(1, 3, 2, 2))
    assert images.with_frames(lambda count: [0]) is images
    ragged = Media(kind="video", values=(torch.rand(9, 3, 2, 2), torch.rand(5, 3, 2, 2)), rate=8.0)
    with pytest.raises(
        BatchError, match=r"frames read of videos of \[5, 9\] frames have several rates, 2, 4 per second"
    ):
        ragged.with_frames(lambda count: spread(3, count))


def test_spread_frames_are_at_equal_distances_with_both_ends_and_stay_when_asked_again() -> None:
    assert spread(4, 9) == [0, 3, 5, 8] and spread(1, 9) == [0] and spread(9, 3) == [0, 1, 2]
    for total in range(1, 90):
        for count in range(1, 20):
            places = spread(count, total)
            assert len(places) == min(count, total) and places == sorted(set(places))
            assert spread(count, len(places)) == list(range(len(places)))
            steps = len(places) - 1
            # No place is off by more than half a frame: |place - number (total - 1) / steps| <= 1 / 2.
            if count > 1:
                assert all(abs(2 * place * steps - 2 * n * (total - 1)) <= steps for n, place in enumerate(places))


def test_pixels_of_8_bits_are_read_as_numbers_and_kept_as_levels() -> None:
    """n / 255 rounded once, as a file's pixels are; a quarter of the bytes of fp32."""
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    expected = (
        torch.tensor([n / 255 for n in range(256)], dtype=torch.float64).float().view(16, 16).expand(2, 3, 16, 16)
    )
    for values in (levels, tuple(levels)):
        media = Media(kind="image", values=values)
        assert torch.equal(media.stacked, expected)
        assert all(torch.equal(array, one) for array, one in zip(media.arrays, expected, strict=True))
        assert torch.equal(media.array(1), expected[1])
        assert {array.dtype for array in media.mapped(lambda array: array.contiguous()).stored} == {torch.uint8}
        assert 4 * sum(array.nbytes for array in media.stored) == expected.nbytes
    videos = torch.randint(256, (2, 9, 3, 2, 2), dtype=torch.uint8)
    chosen = Media(kind="video", values=videos, rate=8.0).with_frames(lambda count: [0, 4])
    assert same(chosen.values, videos[:, [0, 4]])
    # Joined as tensors, level 200 would become the pixel 200.0.
    with pytest.raises(BatchError, match=r"Media\.concat: got torch\.float32 and torch\.uint8 pixels, expected one"):
        Media.concat([Media(kind="image", values=levels), Media(kind="image", values=expected)])
