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
from unirl.core.observe.tracking import MAX_SAMPLES, Trackers
from unirl.core.roles import RunInfo
from unirl.core.types.batch import same
from unirl.core.types.event import Event
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status, Track


class Shows:
    """A tracker that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: RunInfo) -> None: ...

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls.append(("log", step))

    def samples(self, key: str, media: Media, captions: Sequence[str], *, step: int) -> None:
        self.calls.append((key, media, list(captions), step))

    def event(self, event: Event) -> None: ...

    def finish(self, status: str) -> None: ...


class Full(Shows):
    def samples(self, key: str, media: Media, captions: Sequence[str], *, step: int) -> None:
        raise OSError("no space left")


def written(*texts: str) -> Media:
    return Media(kind="text", values=texts)


def track(rows: int, **fields: Any) -> Track:
    return Track(
        name="trial",
        **{
            "sample_ids": tuple(f"s{row}" for row in range(rows)),
            "group_ids": ("g",) * rows,
            "inputs": Inputs.of_texts([f"prompt {row}" for row in range(rows)]),
            "metadata": ({},) * rows,
            "rewards": torch.full((rows,), 0.5),
            "sample_weights": torch.ones(rows),
            "status": (Status.COMPLETED,) * rows,
            "policy_version": (0,) * rows,
            **fields,
        },
    )


def shown(*tracks: Track, by: dict[str, Shows]) -> list[str]:
    """Hand the tracks to the trackers, then a step; returns the findings."""
    events, result = EventStream(), list[str]()
    events.listen(lambda event: result.append(event.data["text"]) if event.kind == "finding" else None)
    trackers = Trackers(by, events)
    trackers.start(RunInfo(name="trial", folder=Path(), plan_hash="", config={}))
    for number, one in enumerate(tracks):
        trackers.samples("train", one, step=number)
    events.emit("step", step=9, metrics={"reward_mean": 0.5})
    return result


def test_samples_are_shown_with_prompt_reward_and_whether_they_were_cut_off() -> None:
    tracker = Shows()
    texts = track(
        2,
        media=written("four", "so we add and"),
        rewards=torch.tensor([1.0, -0.25]),
        status=(Status.COMPLETED, Status.TRUNCATED),
    )
    assert shown(texts, by={"t": tracker}) == []
    captions = ["prompt 0 | reward 1.00", "prompt 1 | reward -0.25 | truncated"]
    assert tracker.calls == [("train", written("four", "so we add and"), captions, 0), ("log", 9)]


ROWS = MAX_SAMPLES + 1


@pytest.mark.parametrize(
    "media",
    [
        Media(kind="image", values=torch.rand(ROWS, 3, 2, 2)),
        Media(kind="video", values=tuple(torch.rand(row % 3 + 1, 3, 2, 2) for row in range(ROWS)), rate=8.0),
        written(*map(str, range(ROWS))),
    ],
    ids=["image", "video", "text"],
)
def test_a_track_shows_the_first_of_its_samples(media: Media) -> None:
    tracker = Shows()
    assert shown(track(ROWS, media=media), by={"t": tracker}) == []
    (_, result, captions, _), _ = tracker.calls
    assert same(result, media.select(range(MAX_SAMPLES))) and len(captions) == MAX_SAMPLES


def test_a_track_without_rewards_or_samples_shows_nothing() -> None:
    tracker = Shows()
    assert shown(track(1, media=written("a"), rewards=None), track(1), by={"t": tracker}) == []
    assert tracker.calls == [("log", 9)]


def test_a_tracker_that_fails_at_samples_is_left_out_and_the_others_are_not() -> None:
    full, other = Full(), Shows()
    texts = track(1, media=written("a"))
    (finding,) = shown(texts, texts, by={"full": full, "other": other})
    assert finding == "tracker.full failed and is off from here: OSError: no space left"
    assert full.calls == [] and [call[0] for call in other.calls] == ["train", "train", "log"]


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
