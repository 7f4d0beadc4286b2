"""Targets, agreement of texts, and reading rendered text with known answers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.detect import ocr
from unirl.rewards.detect.config import OcrConfig
from unirl.rewards.detect.text_reader import TextReader
from unirl.rewards.detect.text_target import Agreement, agreement, normalised, target_of


@pytest.mark.parametrize(
    ("prompt", "metadata", "target"),
    [
        ('a sign that says "Hello World"', {}, "Hello World"),
        ("a sign that says “Hello” and “World”", {}, "Hello"),
        ('“first” and "second"', {}, "first"),
        ("it's a sign with \"Joe's\"", {}, "Joe's"),
        ('a sign that says "wrong"', {"text": "right"}, "right"),
        ("no quotes", {"text": "42"}, "42"),
    ],
)
def test_the_target_is_explicit_or_quoted(prompt: str, metadata: dict[str, Any], target: str) -> None:
    assert target_of(prompt, metadata) == target


@pytest.mark.parametrize(
    ("prompt", "metadata", "message"),
    [
        ("a sign", {}, "no target"),
        ('a 5" screen', {}, "no target"),
        ('a sign that says "  "', {}, "got the target '  '"),
        ("a sign", {"text": ""}, "got the target ''"),
        ("a sign", {"text": 5}, "metadata 'text': got 5, expected a string"),
    ],
)
def test_a_prompt_without_a_target_is_refused(prompt: str, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target_of(prompt, metadata)


def test_case_space_and_width_do_not_count() -> None:
    assert normalised(" Ｏpen\n24　H ") == "open24h"


def test_agreement_of_hand_made_texts() -> None:
    # kitten and sitting: three edits, target of 7; the subsequence "ittn" has 4 of 6.
    assert agreement("kitten", "Sitting") == Agreement(
        similarity=pytest.approx(4 / 7),
        exact=0,
        substring=0,
        contained=pytest.approx(4 / 7),
        precision=pytest.approx(4 / 6),
    )
    assert agreement("HEL LO", "hello") == Agreement(similarity=1, exact=1, substring=1, contained=1, precision=1)
    assert agreement("", "hello") == Agreement(similarity=0, exact=0, substring=0, contained=0, precision=0)


def test_text_besides_the_target_is_not_free() -> None:
    extra = agreement("hello world", "hello")
    # Five added characters for a target of five; half of what was read belongs to it.
    assert extra == Agreement(similarity=0, exact=0, substring=1, contained=1, precision=0.5)
    assert agreement("hello!" * 20, "hello").similarity == 0


def page(
    text: str, *, size: int, place: tuple[int, int] = (20, 20), color: str = "black", ground: str = "white"
) -> Any:
    """[3, 160, 448] pixels of a line of text in Pillow's own font."""
    image = Image.new("RGB", (448, 160), ground)
    ImageDraw.Draw(image).text(place, text, fill=color, font=ImageFont.load_default(size))
    return torch.from_numpy(np.asarray(image) / np.float32(255)).permute(2, 0, 1)


def as_samples(pixels: list[Any], targets: list[str], **fields: Any) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(len(targets)))
    return ScoreInput(
        **{
            "sample_ids": names,
            "group_ids": names,
            "inputs": Inputs.of_texts([f'a sign that says "{target}"' for target in targets]),
            "metadata": ({},) * len(targets),
            "media": Media(kind="image", values=tuple(pixels)),
            **fields,
        }
    )


@pytest.fixture(scope="module")
def reward() -> ocr.OcrReward:
    # Large enough for these pages, and a fifth of the time of the default.
    return ocr.build(OcrConfig(min_side_px=320, processes=1), device="cpu")


PAGES = [
    ("OPEN 24 HOURS", page("OPEN 24 HOURS", size=40)),
    ("Flow Matching", page("Flow Matching", size=24, place=(200, 110), color="navy", ground="khaki")),
    ("reward", page("reward", size=64, place=(60, 40), color="yellow", ground="black")),
    ("Straße", page("STRASSE", size=36, place=(120, 60), color="white", ground="darkgreen")),
    ("two lines", page("two\nlines", size=44, place=(150, 20), color="crimson")),
]


@pytest.mark.parametrize(("text", "pixels"), PAGES, ids=[text for text, _ in PAGES])
def test_rendered_text_is_read(reward: ocr.OcrReward, text: str, pixels: Any) -> None:
    scores = reward.score(as_samples([pixels], [text]))
    assert {name: values.item() for name, values in scores.parts.items()} == {
        "similarity": 1,
        "exact": 1,
        "substring": 1,
        "contained": 1,
        "precision": 1,
    }
    assert scores.values.item() == 1 and scores.values.dtype == torch.float32


def test_wrong_missing_and_added_text_score_less(reward: ocr.OcrReward) -> None:
    pixels = [page("HOUSE", size=48), page("SALE TODAY", size=40), torch.ones(3, 160, 448)]
    scores = reward.score(as_samples(pixels, ["HORSE", "SALE", "SALE"]))
    # One of five letters; five added letters for four, which cost all; nothing.
    assert scores.values.tolist() == pytest.approx([0.8, 0.0, 0.0])
    assert scores.parts["substring"].tolist() == [0, 1, 0]
    assert scores.parts["precision"].tolist() == pytest.approx([0.8, 4 / 9, 0.0])


@pytest.mark.slow
def test_two_processes_read_what_one_does_in_the_same_order(reward: ocr.OcrReward) -> None:
    """And end with the reward; one that ends before is named, and others take its place."""
    samples = as_samples([pixels for _, pixels in PAGES[:3]], [text for text, _ in PAGES[:3]])
    expected = reward.score(samples)
    assert expected.values.tolist() == [1, 1, 1]
    pool = ocr.build(OcrConfig(min_side_px=320, processes=2), device="cpu")
    try:
        for order in ([0, 1, 2], [2, 0, 1]):
            # The wrong targets of the second order: a text that is not of its image.
            result = pool.score(dataclasses.replace(samples, media=samples.select(order).media))
            assert (
                result.values.tolist()
                == reward.score(dataclasses.replace(samples, media=samples.select(order).media)).values.tolist()
            )
        assert len(multiprocessing.active_children()) <= 2
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(
            RewardFailed, match=r"^reward\.ocr: a process that reads images ended\. .* reward\.ocr\.proc"
        ):
            pool.score(samples)
        assert pool.score(samples).values.tolist() == [1, 1, 1]
    finally:
        pool.close()
    pool.close()
    assert not multiprocessing.active_children()


def test_by_default_there_are_as_many_processes_as_threads_of_torch_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(ocr, "Readers", lambda settings, *, processes, key: counts.append(processes))
    before = torch.get_num_threads()
    try:
        for number in (1, 6):
            torch.set_num_threads(number)
            for config in (OcrConfig(), OcrConfig(threads=4), OcrConfig(processes=5)):
                ocr.build(config, device="cpu")
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 1, 5, 6, 1, 5]


def test_channels_are_not_swapped(reward: ocr.OcrReward) -> None:
    """Blue on a red whose luma is the same can be told apart by colour alone, in either order; so the reader's input is
    looked at instead."""
    seen: list[np.ndarray] = []

    class Spy:
        def __call__(self, pixels: np.ndarray) -> Any:
            seen.append(pixels)
            return type("Lines", (), {"txts": None})()

    reader = TextReader.__new__(TextReader)
    reader._engine = Spy()  # pyright: ignore[reportPrivateUsage]
    assert reader.read(Image.new("RGB", (4, 2), (10, 20, 30))) == ""
    assert seen[0].shape == (2, 4, 3) and seen[0][0, 0].tolist() == [30, 20, 10]


@pytest.mark.parametrize("name", ["similarity", "exact", "substring", "contained", "precision"])
def test_the_score_is_the_chosen_component(name: str) -> None:
    chosen = ocr.build(OcrConfig(score=name, min_side_px=160, processes=1), device="cpu")
    scores = chosen.score(as_samples([page("HOUSES", size=48)], ["HOUSE"]))
    # One added letter for a target of five.
    expected = {"similarity": 0.8, "exact": 0.0, "substring": 1.0, "contained": 1.0, "precision": 5 / 6}[name]
    assert scores.values.item() == pytest.approx(expected)


def test_bad_samples_are_refused_by_name(reward: ocr.OcrReward) -> None:
    blank = torch.ones(1, 3, 32, 32)
    with pytest.raises(RewardFailed, match=r"^reward\.ocr: sample 's0' \(prompt 'no quotes'\): no target"):
        reward.score(as_samples([blank[0]], ["x"], inputs=Inputs.of_texts(["no quotes"])))
    video = Media(kind="video", values=torch.zeros(1, 2, 3, 8, 8), rate=8.0)
    with pytest.raises(RewardFailed, match=r"reward\.ocr: got video, expected image"):
        reward.score(as_samples([blank[0]], ["x"], media=video))
    with pytest.raises(RewardFailed, match=r"reward\.ocr: got pixels of NaN in sample 's0'"):
        reward.score(as_samples([blank[0] * float("nan")], ["x"]))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        ocr.build(OcrConfig(), device="cpu")
    assert "pip install 'unirl-reward-detect[ocr]'" in "".join(caught.value.__notes__)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    result = ocr.build(OcrConfig(min_side_px=160, processes=1), device="cpu").score(
        as_samples([page("local", size=48)], ["local"])
    )
    assert result.values.item() == 1
