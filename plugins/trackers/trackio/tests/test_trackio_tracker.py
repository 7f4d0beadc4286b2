"""The Trackio tracker, in files and on a real server; what is logged is read back with Trackio's own API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tracker_sessions import CONFIG, run_info, two_sessions
from unirl.conformance.doubles.samples import make_samples
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import Tracker
from unirl.core.types.media import Media
from unirl.trackers.trackio import plugin
from unirl.trackers.trackio.config import TrackioConfig
from unirl.trackers.trackio.tracker import build

pytestmark = pytest.mark.slow

READER = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage

print(json.dumps([
    {
        "id": run.id, "name": run.name, "config": run.config,
        "alerts": [[alert["title"], alert["text"]] for alert in run.alerts()],
        "rows": SQLiteStorage.get_logs(run.project, run.name, run_id=run.id),
    }
    for run in trackio.Api().runs(sys.argv[1])
], default=str))
"""
SERVER = """
import sys, trackio
trackio.show(open_browser=False, block_thread=True, host="127.0.0.1", {port})
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TRACKIO_"):
            monkeypatch.delenv(name)


def read_back(folder: Path, project: str = "unirl") -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", READER, project],
        env={**os.environ, "TRACKIO_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def values(run: dict[str, Any], key: str) -> list[tuple[int, Any]]:
    """Every value that is there under a key, with its step, in order."""
    return sorted(((row["step"], row[key]) for row in run["rows"] if key in row), key=lambda point: point[0])


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run folder of a run of four steps and its only run in Trackio: resumed at 2, so step 3 is done twice."""

    def shows(tracker: Tracker) -> None:
        texts = Media(kind="text", values=("4", "two\r\nlines 四", "left out"))
        track = make_samples(texts, ["2 + 2", "a | b", "x"], [1.0, -0.5, 0.0], truncated=[1])
        tracker.samples("eval", track, step=2, lineage={})
        parent = make_samples(Media(kind="text", values=("a red ring",)), ["ring"], name="rewrite")
        child = make_samples(Media(kind="image", values=torch.rand(1, 3, 8, 8)), ["ring"], name="image", parent=parent)
        tracker.samples("train/image", child, step=2, lineage={"rewrite": Media(kind="text", values=("a red ring",))})

    folder = tmp_path_factory.mktemp("run")
    two_sessions(lambda: build(TrackioConfig(group="tiny", max_images=2, max_texts=2)), folder, shows=shows)
    (run,) = read_back(folder / "trackio")
    return folder, run


def test_the_spec_names_a_build_and_a_config_that_exist() -> None:
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{TrackioConfig.__module__}:{TrackioConfig.__qualname__}"


def test_a_resumed_run_is_the_same_trackio_run_and_repeats_no_step(sessions: tuple[Path, dict[str, Any]]) -> None:
    folder, run = sessions
    assert json.loads((folder / "trackio" / "unirl-run.json").read_text()) == {"id": run["id"]}
    assert values(run, "reward_mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert values(run, "a, b") == [(step, 1.0) for step in (1, 2, 3, 4)]


def test_name_recipe_findings_and_status_reach_trackio(sessions: tuple[Path, dict[str, Any]]) -> None:
    _, run = sessions
    assert (run["name"], run["config"]["_Group"], run["config"]["plan_hash"]) == ("first", "tiny", "abc")
    assert CONFIG.items() <= run["config"].items()
    assert sorted(map(tuple, run["alerts"])) == [
        ("finding", "small gradient"),
        ("run done", None),
        ("run stopped", None),
    ]


def test_images_and_videos_are_saved_with_their_captions_once_each(sessions: tuple[Path, dict[str, Any]]) -> None:
    folder, run = sessions
    media = folder / "trackio" / "media"
    shown = values(run, "eval/01")
    assert [(step, value["_type"], value["caption"]) for step, value in shown] == [
        (step, "trackio.image", "a dog | reward 0.20") for step in (1, 2, 3, 4)
    ]
    assert not values(run, "eval/02")
    with Image.open(media / shown[2][1]["file_path"]) as picture:
        assert (picture.size, picture.convert("RGB").getpixel((4, 4))) == ((8, 8), (153, 153, 153))
    for row, caption in enumerate(("clip", "other")):
        ((step, video),) = values(run, f"clips/{row:02d}")
        assert (step, video["_type"], video["caption"]) == (2, "trackio.video", caption)
        with Image.open(media / video["file_path"]) as animation:
            assert (animation.n_frames, animation.size, animation.info["duration"]) == (4, (8, 8), 200)


def test_texts_are_tables_of_whole_rows_beside_their_parents(sessions: tuple[Path, dict[str, Any]]) -> None:
    _, run = sessions
    ((step, table),) = values(run, "eval/texts")
    assert (step, table["_type"]) == (2, "trackio.table")
    assert table["_value"] == [
        {"prompt": "2 + 2", "text": "4", "reward": 1.0, "truncated": False},
        {"prompt": "a | b", "text": "two\r\nlines 四", "reward": -0.5, "truncated": True},
    ]
    ((_, table),) = values(run, "train/image/samples")
    assert table["_value"] == [{"prompt": "ring", "rewrite": "a red ring", "reward": None, "truncated": False}]


def test_a_folder_of_trackio_wins_over_the_run_folder_and_runs_of_one_name_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("TRACKIO_DIR", str(shared))
    for folder, resumed_at, step in (("one", None, 1), ("other", None, 1), ("one", 1, 2)):
        tracker = build(TrackioConfig(project="shapes"))
        tracker.start(run_info(tmp_path / folder, resumed_at))
        tracker.log({"loss": float(step)}, step=step)
        tracker.finish("done")
    assert not list((tmp_path / "one").rglob("*.db"))
    ids = [json.loads((tmp_path / name / "trackio" / "unirl-run.json").read_text())["id"] for name in ("one", "other")]
    points = {run["id"]: values(run, "loss") for run in read_back(shared, "shapes")}
    assert points == {ids[0]: [(1, 1.0), (2, 2.0)], ids[1]: [(1, 1.0)]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """URL, folder and process of a server of Trackio that takes the token `s3cr3t`."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    folder = tmp_path / "server"
    folder.mkdir()
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "s3cr3t")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(port=f"server_port={port}")],
            env={**os.environ, "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + 60
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
            break
        assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", folder, process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_server_gets_the_run_and_its_loss_does_not_stop_a_run_which_says_so_once(
    tmp_path: Path, server: tuple[str, Path, subprocess.Popen[bytes]]
) -> None:
    url, folder, process = server
    for resumed_at in (None, 2):
        tracker = build(TrackioConfig(server_url=url))
        tracker.start(run_info(tmp_path / "run", resumed_at))
        for step in (1, 2, 3) if resumed_at is None else (3, 4):
            tracker.log({"reward_mean": step / 4}, step=step)
        tracker.finish("done")
    (run,) = read_back(folder)
    assert values(run, "reward_mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]

    events = EventStream()
    findings: list[str] = []
    events.listen(lambda event: findings.append(event.data["text"]) if event.kind == "finding" else None)
    trackers = Trackers({"trackio": build(TrackioConfig(server_url=url))}, events)
    trackers.start(run_info(tmp_path / "second"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    for step in range(1, 51):
        events.emit("step", step=step, metrics={"reward_mean": 0.5}, phases={}, samples=4)
    # Fifty attempts to connect would take no less than this; nothing waits for one.
    assert time.monotonic() - began < 1
    trackers.finish("done", step=50)
    (finding,) = findings
    assert finding.startswith("tracker.trackio failed and is off from here: TrackerFailed:")
    assert "s3cr3t" not in finding
    (kept,) = read_back(tmp_path / "second" / "trackio")
    assert [step for step, _ in values(kept, "reward_mean")] == list(range(1, 51))


def test_a_run_does_not_start_without_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "s3cr3t")
    with pytest.raises(UniRLError, match=r"http://127\.0\.0\.1:9") as raised:
        build(TrackioConfig(server_url="http://127.0.0.1:9")).start(run_info(tmp_path))
    written = str(raised.value) + "".join(file.read_text() for file in tmp_path.rglob("*.log"))
    assert "s3cr3t" not in written


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrackioConfig(init_timeout_s=0), "tracker.trackio.init_timeout_s: got 0, expected more than 0"),
        (TrackioConfig(max_images=0), "tracker.trackio.max_images: got 0, expected 1 or more"),
        (TrackioConfig(max_texts=0), "tracker.trackio.max_texts: got 0, expected 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_key(config: TrackioConfig, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(config)
