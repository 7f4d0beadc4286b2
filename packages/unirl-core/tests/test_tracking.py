"""Samples passed to trackers, and the handling of trackers that fail on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import RunFailed
from unirl.core.observe.caption import captions
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import MAX_SAMPLES, Trackers
from unirl.core.roles import RunInfo
from unirl.core.types.batch import same
from unirl.core.types.event import Event
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.rollout import Rollout
from unirl.core.types.track import Conditions, Status, Track


class Shows:
    """A tracker that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: RunInfo) -> None: ...

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls.append(("log", step))

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        self.calls.append((key, track, dict(lineage), step))

    def event(self, event: Event) -> None: ...

    def finish(self, status: str) -> None: ...


class Full(Shows):
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        raise OSError("no space left")


def written(*texts: str) -> Media:
    return Media(kind="text", values=texts)


def track(rows: int, **fields: Any) -> Track:
    return Track(
        **{
            "name": "trial",
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


INFO = RunInfo(name="trial", folder=Path(), plan_hash="", config={})


def started(tracker: Shows, events: EventStream) -> Trackers:
    result = Trackers({"t": tracker}, events)
    result.start(INFO)
    return result


def shown(*tracks: Track, by: dict[str, Shows]) -> list[str]:
    """Hand the tracks to the trackers, then a step; returns the findings."""
    events, result = EventStream(), list[str]()
    events.listen(lambda event: result.append(event.data["text"]) if event.kind == "finding" else None)
    trackers = Trackers(by, events)
    trackers.start(INFO)
    for number, one in enumerate(tracks):
        trackers.samples("train", Rollout(tracks={one.name: one}), step=number)
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
    (key, result, lineage, step), log = tracker.calls
    assert (key, lineage, step, log) == ("train", {}, 0, ("log", 9)) and same(result, texts)
    assert captions(result) == ["prompt 0 | reward 1.00", "prompt 1 | reward -0.25 | truncated"]


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
    (_, result, _, _), _ = tracker.calls
    assert same(result.media, media.select(range(MAX_SAMPLES))) and result.num_rows == MAX_SAMPLES


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


def test_children_are_shown_beside_what_they_descend_from() -> None:
    """Three stages: drafts without rewards, two rewrites of each, and so many images that only the first are shown."""
    drafts = track(ROWS, name="draft", media=written(*(f"d{row}" for row in range(ROWS))), rewards=None)
    rewrites = track(
        2 * ROWS,
        name="rewrite",
        sample_ids=tuple(f"w{row}" for row in range(2 * ROWS)),
        parent_track="draft",
        parent_ids=tuple(f"s{row // 2}" for row in range(2 * ROWS)),
        media=written(*(f"w{row}" for row in range(2 * ROWS))),
    )
    images = track(
        2 * ROWS,
        name="image",
        parent_track="rewrite",
        parent_ids=tuple(f"w{row}" for row in range(2 * ROWS)),
        media=Media(kind="image", values=torch.rand(2 * ROWS, 3, 2, 2)),
        conditions={"positive": Conditions(values={"x": torch.zeros(1, 1)}, index=torch.zeros(2 * ROWS).long())},
    )
    tracker, events = Shows(), EventStream()
    # The order of the mapping does not matter.
    rollout = Rollout(tracks={"image": images, "rewrite": rewrites, "draft": drafts})
    started(tracker, events).samples("eval", rollout, step=3)
    assert [call[0] for call in tracker.calls] == ["eval/draft", "eval/rewrite", "eval/image"]
    (_, _, first, _), (_, shown_rewrites, second, _), (_, shown_images, third, _) = tracker.calls
    assert first == {} and list(second) == ["draft"] and list(third) == ["draft", "rewrite"]
    assert second["draft"].texts == tuple(f"d{row // 2}" for row in range(MAX_SAMPLES))
    assert third["draft"].texts == second["draft"].texts
    assert third["rewrite"].texts == shown_rewrites.media.texts == tuple(f"w{row}" for row in range(MAX_SAMPLES))
    assert shown_images.num_rows == MAX_SAMPLES and shown_images.conditions == {}


def test_children_of_samples_that_are_not_shown_are_not_shown() -> None:
    texts = track(ROWS, name="rewrite", media=written(*map(str, range(ROWS))))
    images = track(
        2,
        name="image",
        parent_track="rewrite",
        parent_ids=(f"s{ROWS - 1}", "s1"),
        media=Media(kind="image", values=torch.rand(2, 3, 2, 2)),
    )
    tracker = Shows()
    rollout = Rollout(tracks={"rewrite": texts, "image": images})
    started(tracker, EventStream()).samples("train", rollout, step=0)
    _, (_, result, lineage, _) = tracker.calls
    assert result.sample_ids == ("s1",) and lineage["rewrite"].texts == ("1",)


class Fails(Shows):
    def start(self, run: RunInfo) -> None:
        raise OSError("no network")

    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))


class Ends(Shows):
    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))


def test_only_trackers_that_started_hear_of_the_end() -> None:
    events, findings = EventStream(), list[str]()
    events.listen(lambda event: findings.append(event.data["text"]) if event.kind == "finding" else None)
    first, failing, last = Ends(), Fails(), Ends()
    trackers = Trackers({"first": first, "failing": failing, "last": last}, events)
    with pytest.raises(RunFailed, match=r"^tracker\.failing: could not start: no network"):
        trackers.start(INFO)
    events.emit("step", step=1, metrics={"reward_mean": 0.5})
    trackers.finish("failed", step=1)
    assert first.calls == [("log", 1), ("finish", "failed")]
    assert (failing.calls, last.calls, findings) == ([], [], [])
