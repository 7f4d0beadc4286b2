"""The event stream: appended, flushed, mended after a crash, read back in order."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from unirl.core.errors import RunFolderError
from unirl.core.observe.events import EventStream, read_events
from unirl.core.types.event import Event


def test_events_come_back_in_order_with_their_data(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    stream = EventStream(path)
    stream.emit("step", step=1, metrics={"reward_mean": 0.5}, samples=8)
    stream.emit("finding", step=1, text="größer\nzweite Zeile")
    stream.close()
    result = read_events(path)
    assert [(event.kind, event.step) for event in result] == [("step", 1), ("finding", 1)]
    assert result[0].data == {"metrics": {"reward_mean": 0.5}, "samples": 8}
    assert result[1].data["text"] == "größer\nzweite Zeile"


def test_numbers_that_are_not_finite_are_null_for_any_json_reader(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stream, seen = EventStream(path), list[Event]()
    stream.listen(seen.append)
    stream.emit(
        "step", step=1, metrics={"ratio": math.inf, "kl": -math.inf, "norm": math.nan, "lr": 0.5}, rest=[math.inf]
    )
    stream.close()
    assert seen[0].data["metrics"]["ratio"] == math.inf

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert (line["metrics"], line["rest"]) == ({"ratio": None, "kl": None, "norm": None, "lr": 0.5}, [None])
    (event,) = read_events(path)
    assert {key for key, value in event.data["metrics"].items() if math.isnan(value)} == {"ratio", "kl", "norm"}


def test_a_line_is_on_disk_before_a_listener_sees_the_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stream = EventStream(path)
    seen: list[int] = []
    stream.listen(lambda event: seen.append(len(read_events(path))))
    stream.emit("step", step=1)
    stream.emit("step", step=2)
    stream.close()
    assert seen == [1, 2]


def test_an_event_may_be_emitted_while_another_is_shown() -> None:
    stream, seen = EventStream(), list[Event]()

    def answer(event: Event) -> None:
        if event.kind == "step":
            stream.emit("finding", step=event.step, text="tracker is off")

    stream.listen(answer)
    stream.listen(seen.append)
    stream.emit("step", step=1)
    assert sorted(event.kind for event in seen) == ["finding", "step"]


def test_a_resumed_stream_goes_on_after_a_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"step","step":1,"time":0}\n{"kind":"step","st', encoding="utf-8")
    assert [event.step for event in read_events(path)] == [1]
    stream = EventStream(path)
    stream.emit("run_resumed", step=1)
    stream.close()
    assert [event.kind for event in read_events(path)] == ["step", "run_resumed"]


def _replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "events.jsonl").write_text("")


@pytest.mark.parametrize(
    "lose",
    [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved")), _replaced],
    ids=["deleted", "moved", "replaced"],
)
def test_a_stream_whose_file_is_gone_says_so_at_the_next_event(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """An open handle of a deleted file takes lines for ever. The listeners still get the end of the run."""
    path, seen = tmp_path / "run" / "events.jsonl", list[Event]()
    stream = EventStream(path)
    stream.listen(seen.append)
    stream.emit("step", step=1)
    stream.check()
    lose(path.parent)
    with pytest.raises(
        RunFolderError, match=r"run/events\.jsonl: .* is gone: it, or its run folder, was deleted, moved"
    ):
        stream.emit("step", step=2)
    with pytest.raises(RunFolderError, match="is gone"):
        stream.check()
    stream.emit("run_finished", step=1)
    stream.close()
    assert [event.kind for event in seen] == ["step", "run_finished"]
    assert not path.exists() or path.read_text() == ""


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"step","step":1,"time":0}', encoding="utf-8")
    EventStream(path).close()
    assert [event.step for event in read_events(path)] == [1]


@pytest.mark.parametrize(
    "line",
    [
        *("{broken", "3", "[]", "null", '"text"', '{"kind":"step"}', "[" * 100_000, "9" * 5_000, "{} {}", "\\ud800"),
        *('{"kind":3,"step":1,"time":0}', '{"kind":["step"],"step":1,"time":0}', '{"kind":"step","step":"1","time":0}'),
        *(
            '{"kind":"step","step":true,"time":0}',
            '{"kind":"step","step":-1,"time":0}',
            '{"kind":"s","step":1.5,"time":0}',
        ),
        *('{"kind":"step","step":1e400,"time":0}', f'{{"kind":"step","step":{10**400},"time":0}}'),
        *(
            '{"kind":"step","step":1,"time":"0"}',
            '{"kind":"step","step":1,"time":NaN}',
            '{"kind":"s","step":1,"time":1e300}',
        ),
        f'{{"kind":"step","step":1,"time":{10**400}}}',
    ],
)
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{line}\n{{"kind":"step","step":1,"time":0}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"events.jsonl:1: "):
        read_events(path)


def test_events_say_where_they_were_read_and_have_no_half_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = ['{"kind":"a","step":0,"time":0}', "", '{"kind":"b","step":1,"time":2,"name":"\\ud800 \\ud83d\\ude00"}', ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    first, second = read_events(path)
    assert (first.read_from, second.read_from) == (f"{path}:1", f"{path}:3")
    assert second.data == {"name": "? \U0001f600"}
    path.write_bytes(b'{"kind":"a","step":0,"time":0,"x":"\xff"}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl: not UTF-8 text \(byte 35\)"):
        read_events(path)


def test_data_cannot_take_the_place_of_the_events_own_time() -> None:
    with pytest.raises(ValueError, match="'time' is the time of the event itself"):
        EventStream().emit("step", step=1, time=3.0)
