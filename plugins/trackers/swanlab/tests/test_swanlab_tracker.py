"""The SwanLab tracker, really run offline; its files are read back with SwanLab's own reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from tracker_sessions import CONFIG, run_info, two_sessions
from unirl.conformance.doubles.samples import make_samples
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.roles import Tracker
from unirl.core.types.media import Media
from unirl.trackers.swanlab import plugin
from unirl.trackers.swanlab.config import SwanlabConfig
from unirl.trackers.swanlab.tracker import build

pytestmark = pytest.mark.slow

READER = """
import json, sys
from google.protobuf.json_format import MessageToDict
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

reader, result = DataStoreReader(), []
reader.open(sys.argv[1])
for content in reader:
    record = Record()
    record.ParseFromString(content)
    result.append(MessageToDict(record, preserving_proto_field_name=True))
print(json.dumps(result))
"""
Sessions = tuple[list[Path], list[list[dict[str, Any]]]]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("SWANLAB_"):
            monkeypatch.delenv(name)
    # A login of the user that runs the tests must not count.
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    # Port 9, where nothing listens.
    monkeypatch.setenv("SWANLAB_API_HOST", "http://127.0.0.1:9")


def read_back(file: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", READER, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def files(folder: Path) -> list[Path]:
    """Files of the sessions, in the order in which they began: folders are named by time."""
    return sorted(folder.glob("run-*/run-*.swanlab"))


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if kind in record]


def points(records: list[dict[str, Any]], key: str) -> list[tuple[int, Any]]:
    return [
        (int(entry.get("step", 0)), entry["value"].get("number", entry["value"].get("items")))
        for kind in ("scalar", "media")
        for entry in of_kind(records, kind)
        if entry["key"] == key
    ]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """Files and records of two sessions: stopped after step 3 and resumed at 2, so step 3 is done twice."""

    def shows(tracker: Tracker) -> None:
        texts = Media(kind="text", values=("4", "two\r\nlines 四", "", "left out"))
        track = make_samples(texts, ["2 + 2", "a | b", "empty", "x"], [1.0, -0.5, 0.25, 0.0], truncated=[1])
        tracker.samples("eval", track, step=2, lineage={})

    folder = tmp_path_factory.mktemp("run")
    config = SwanlabConfig(
        mode="offline", project="shapes", tags=["cpu", "tiny"], notes="hello", max_images=2, max_texts=3
    )
    two_sessions(lambda: build(config), folder, shows=shows)
    found = files(folder / "swanlab")
    return found, [read_back(file) for file in found]


def test_the_spec_names_a_build_and_a_config_that_exist() -> None:
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{SwanlabConfig.__module__}:{SwanlabConfig.__qualname__}"


def test_a_resumed_run_is_the_same_swanlab_run_and_repeats_no_step(sessions: Sessions) -> None:
    found, records = sessions
    kept = json.loads((found[0].parents[1] / "unirl-run.json").read_text())
    starts = [of_kind(session, "start")[0] for session in records]
    assert [start["id"] for start in starts] == [kept["id"]] * 2
    # What makes `swanlab sync` of the second folder continue the run that the first one made.
    assert starts[1]["resume"] == "RESUME_MODE_ALLOW"
    assert [points(session, "reward_mean") for session in records] == [[(1, 0.25), (2, 0.5), (3, 0.75)], [(4, 1.0)]]
    assert [step for session in records for step, _ in points(session, "a, b")] == [1, 2, 3, 4]


def test_name_project_tags_notes_recipe_findings_and_status_reach_swanlab(sessions: Sessions) -> None:
    found, records = sessions
    start = of_kind(records[0], "start")[0]
    assert (start["name"], start["project"], start["tags"]) == ("first", "shapes", ["cpu", "tiny"])
    assert start["description"] == "hello"
    config = yaml.safe_load((found[0].parent / "files" / "config.yaml").read_text())
    assert {key: entry["value"] for key, entry in config.items()} == {
        **CONFIG,
        "plan_hash": "abc",
        "findings": ["step 2: small gradient"],
    }
    states = [of_kind(session, "finish")[0]["state"] for session in records]
    assert states == ["RUN_STATE_ABORTED", "RUN_STATE_FINISHED"]


def test_images_videos_and_texts_are_saved_whole_with_their_captions(sessions: Sessions) -> None:
    found, records = sessions
    media = found[0].parent / "media"
    shown = points(records[0], "eval")
    assert [(step, [item["caption"] for item in items]) for step, items in shown] == [
        (step, ["a cat | reward 0.10", "a dog | reward 0.20"]) for step in (1, 2, 3)
    ]
    with Image.open(media / "image" / shown[2][1][1]["filename"]) as picture:
        assert (picture.size, picture.convert("RGB").getpixel((4, 4))) == ((8, 8), (153, 153, 153))
    ((_, videos),) = points(records[0], "clips")
    assert [item["caption"] for item in videos] == ["clip", "other"]
    # SwanLab keeps animations among the images.
    with Image.open(media / "image" / videos[0]["filename"]) as animation:
        assert (animation.n_frames, animation.size, animation.info["duration"]) == (4, (8, 8), 200)
    ((step, texts),) = points(records[0], "eval/texts")
    assert step == 2
    assert [item["caption"] for item in texts] == [
        "2 + 2 | reward 1.00",
        "a | b | reward -0.50 | truncated",
        "empty | reward 0.25",
    ]
    contents = [(media / "text" / item["filename"]).read_bytes().decode() for item in texts]
    assert contents == ["4", "two\r\nlines 四", ""]


@pytest.mark.parametrize("folder", ["SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"])
def test_variables_of_swanlab_win_over_our_defaults_and_the_recipe_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, value in {
        "SWANLAB_MODE": "offline",
        "SWANLAB_PROJ_NAME": "theirs",
        "SWANLAB_EXP_NAME": "named",
        "SWANLAB_TAGS": "a,b",
        folder: str(elsewhere),
    }.items():
        monkeypatch.setenv(name, value)
    for number, config in enumerate((SwanlabConfig(), SwanlabConfig(project="ours", name="mine", tags=["t"]))):
        tracker = build(config)
        tracker.start(run_info(tmp_path / f"run-{number}"))
        tracker.finish("failed")
    starts = [of_kind(read_back(file), "start")[0] for file in files(elsewhere)]
    assert sorted((start["project"], start["name"], *start["tags"]) for start in starts) == [
        ("ours", "mine", "t"),
        ("theirs", "named", "a", "b"),
    ]


def test_what_swanlab_only_prints_as_an_error_is_raised(tmp_path: Path) -> None:
    tracker = build(SwanlabConfig(mode="offline"))
    tracker.start(run_info(tmp_path))
    # A folder that cannot be written to, for whomever runs the tests.
    (media,) = (tmp_path / "swanlab").glob("run-*/media")
    shutil.rmtree(media)
    media.write_text("")
    images = make_samples(Media(kind="image", values=torch.rand(1, 3, 8, 8)), ["a cat"])
    with pytest.raises(UniRLError, match="media"):
        tracker.samples("eval", images, step=1, lineage={})
        tracker.finish("done")


def test_a_run_does_not_start_without_a_key_or_a_server_and_no_key_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UniRLError, match=r"no API key was provided.*mode=offline"):
        build(SwanlabConfig()).start(run_info(tmp_path / "one"))
    monkeypatch.setenv("SWANLAB_API_KEY", "s3cr3t")
    with pytest.raises(UniRLError, match=r"mode 'online', server http://127\.0\.0\.1:9: SwanLab says") as raised:
        build(SwanlabConfig()).start(run_info(tmp_path / "other"))
    written = [file.read_bytes() for file in (tmp_path / "other").rglob("*") if file.is_file()]
    assert "s3cr3t" not in str(raised.value) and not any(b"s3cr3t" in content for content in written)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SwanlabConfig(mode="of-line"), "tracker.swanlab.mode: got 'of-line', expected one of online, offline"),
        (SwanlabConfig(init_timeout_s=0), "tracker.swanlab.init_timeout_s: got 0, expected more than 0"),
        (SwanlabConfig(max_images=0), "tracker.swanlab.max_images: got 0, expected 1 or more"),
        (SwanlabConfig(max_texts=0), "tracker.swanlab.max_texts: got 0, expected 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_key(config: SwanlabConfig, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(config)
