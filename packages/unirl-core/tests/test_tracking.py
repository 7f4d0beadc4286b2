"""What trackers are handed of a run's samples, and what becomes of those that cannot take it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unirl.core.observe.caption import Caption
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import MAX_IMAGES, MAX_TEXTS, Trackers
from unirl.core.roles import RunInfo
from unirl.core.types.event import Event
from unirl.core.types.track import Status, Track


class Before:
    """A tracker of before there were text samples."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: RunInfo) -> None: ...

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls.append(("log", step))

    def images(self, key: str, images: torch.Tensor, captions: Sequence[str], *, step: int) -> None:
        self.calls.append(("images", key, tuple(images.shape), list(captions), step))

    def event(self, event: Event) -> None: ...

    def finish(self, status: str) -> None: ...


class Now(Before):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        self.calls.append(("texts", key, list(texts), list(captions), step))


class Full(Now):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        raise OSError("no space left")


def track(rows: int, **fields: Any) -> Track:
    return Track(
        name="trial",
        **{
            "sample_ids": tuple(f"s{row}" for row in range(rows)),
            "group_ids": ("g",) * rows,
            "prompts": tuple(f"prompt {row}" for row in range(rows)),
            "metadata": ({},) * rows,
            "rewards": torch.full((rows,), 0.5),
            "sample_weights": torch.ones(rows),
            "status": (Status.COMPLETED,) * rows,
            "policy_version": (0,) * rows,
            **fields,
        },
    )


def shown(*tracks: Track, by: dict[str, Before]) -> list[str]:
    """Hand the tracks to the trackers, then a step; returns the findings."""
    events, result = EventStream(), list[str]()
    events.listen(lambda event: result.append(event.data["text"]) if event.kind == "finding" else None)
    trackers = Trackers(by, events)
    trackers.start(RunInfo(name="trial", folder=Path(), plan_hash="", config={}))
    for number, one in enumerate(tracks):
        trackers.samples("train", one, step=number)
    events.emit("step", step=9, metrics={"reward_mean": 0.5})
    return result


def test_texts_are_shown_with_prompt_reward_and_whether_they_were_cut_off() -> None:
    tracker = Now()
    texts = track(
        2,
        texts=("four", "so we add and"),
        rewards=torch.tensor([1.0, -0.25]),
        status=(Status.COMPLETED, Status.TRUNCATED),
    )
    assert shown(texts, by={"t": tracker}) == []
    captions = ["prompt 0 | reward 1.00", "prompt 1 | reward -0.25 | truncated"]
    assert tracker.calls == [("texts", "train", ["four", "so we add and"], captions, 0), ("log", 9)]


def test_a_track_shows_the_first_of_its_images_and_of_its_texts() -> None:
    tracker = Now()
    rows = max(MAX_IMAGES, MAX_TEXTS) + 1
    both = track(rows, images=torch.zeros(rows, 3, 2, 2), texts=tuple(str(row) for row in range(rows)))
    assert shown(both, by={"t": tracker}) == []
    (_, _, shape, image_captions, _), (_, _, texts, text_captions, _), _ = tracker.calls
    assert shape == (MAX_IMAGES, 3, 2, 2) and len(image_captions) == MAX_IMAGES
    assert texts == [str(row) for row in range(MAX_TEXTS)] and len(text_captions) == MAX_TEXTS


def test_a_track_without_rewards_or_samples_shows_nothing() -> None:
    tracker = Now()
    assert shown(track(1, texts=("a",), rewards=None), track(1), by={"t": tracker}) == []
    assert tracker.calls == [("log", 9)]


def test_a_tracker_that_takes_no_texts_goes_on_and_is_named_once() -> None:
    before, now = Before(), Now()
    texts = track(1, texts=("a",))
    images = track(1, images=torch.zeros(1, 3, 2, 2))
    (finding,) = shown(texts, texts, images, by={"old": before, "new": now})
    assert "tracker.old" in finding and "no method `texts`" in finding
    assert [call[0] for call in before.calls] == ["images", "log"]
    assert [call[0] for call in now.calls] == ["texts", "texts", "images", "log"]


def test_a_tracker_that_fails_at_texts_is_left_out_and_the_others_are_not() -> None:
    full, now = Full(), Now()
    texts = track(1, texts=("a",))
    (finding,) = shown(texts, texts, by={"full": full, "now": now})
    assert finding == "tracker.full failed and is off from here: OSError: no space left"
    assert full.calls == [] and [call[0] for call in now.calls] == ["texts", "texts", "log"]


@given(
    prompt=st.text() | st.sampled_from(["a | reward 1.00", "a | reward 0.50 | truncated", "| truncated", "a\nb"]),
    # Hundredths, because captions round to them.
    reward=st.integers(-10_000, 10_000).map(lambda hundredths: hundredths / 100),
    is_truncated=st.booleans(),
)
def test_a_caption_is_read_as_it_was_written(prompt: str, reward: float, is_truncated: bool) -> None:
    caption = Caption(prompt=prompt, reward=reward, is_truncated=is_truncated)
    assert Caption.parse(str(caption)) == caption


@pytest.mark.parametrize(
    "text", ["", "a ring", "a | reward high", "a | reward", "two\nlines | reward high | truncated"]
)
def test_text_of_another_form_is_all_prompt(text: str) -> None:
    assert Caption.parse(text) == Caption(prompt=text, reward=None)
