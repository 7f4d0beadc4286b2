"""The Weights & Biases tracker, really run offline; its files are read back record by record."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from PIL import Image
from unirl.core.errors import RecipeError
from unirl.trackers.wandb import plugin
from unirl.trackers.wandb.config import WandbConfig
from unirl.trackers.wandb.tracker import build

TWO_SESSIONS = """
import json, sys
from pathlib import Path

import torch
from unirl.conformance.doubles.samples import make_samples
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.roles import RunInfo
from unirl.trackers.wandb.config import WandbConfig
from unirl.trackers.wandb.tracker import build

folder = Path(sys.argv[1])
for resumed_at in (None, 2):
    tracker = build(WandbConfig(mode="offline", project="shapes", tags=["cpu", "tiny"], max_images=2, max_texts=3))
    tracker.start(
        RunInfo(name="first", folder=folder, plan_hash="abc", config={"run": {"max_steps": 4}}, resumed_at=resumed_at)
    )
    for step in range((resumed_at or 0) + 1, (resumed_at or 0) + 3):
        tracker.log({"reward_mean": step / 4}, step=step)
    if resumed_at is None:
        images, prompts = Media(kind="image", values=torch.rand(3, 3, 8, 8)), ["a cat", "a dog", "x"]
        tracker.samples("eval", make_samples(images, prompts, [0.1, 0.2, 0.3]), step=2, lineage={})
        frames = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(3, 4, 3, 8, 8)
        clips = Media(kind="video", values=frames, rate=5.0)
        tracker.samples("clips", make_samples(clips, prompts), step=2, lineage={})
        texts = Media(kind="text", values=("4", "two\\r\\nlines 四", "", "left out"))
        prompts = ["2 + 2", "a | reward 0", "empty", "x"]
        tracker.samples("eval", make_samples(texts, prompts, [1.0, -0.5, 0.25, 0.0], truncated=[1]), step=2, lineage={})
        rewrites = Media(kind="text", values=("a red ring", "a disk"))
        parent = make_samples(rewrites, ["ring", "disk"], name="rewrite")
        tracker.samples("train/rewrite", parent, step=2, lineage={})
        for name, media in (("image", Media(kind="image", values=torch.rand(4, 3, 8, 8))), ("video", clips)):
            count = len(media)
            own = make_samples(media, ["ring", "ring", "disk", "disk"][:count], [0.5] * count, name=name, parent=parent)
            beside = {"rewrite": rewrites.select([0, 0, 1, 1][:count])}
            tracker.samples(f"train/{name}", own, step=2, lineage=beside)
    tracker.event(Event(kind="finding", step=2, data={"text": "small gradient"}))
    tracker.finish("done" if resumed_at else "failed")
"""

DISABLED_THEN_NOT_LOGGED_IN = """
import sys
from pathlib import Path

from unirl.core.roles import RunInfo
from unirl.trackers.wandb.config import WandbConfig
from unirl.trackers.wandb.tracker import WandbFailed, build

folder = Path(sys.argv[1])
tracker = build(WandbConfig(mode="disabled"))
tracker.start(RunInfo(name="n", folder=folder, plan_hash="", config={}))
tracker.log({"loss": 1.0}, step=1)
tracker.finish("done")
print([path.name for path in folder.rglob("*") if path.is_file()])

tracker = build(WandbConfig(mode="online", project="shapes"))
try:
    tracker.start(RunInfo(name="n", folder=folder, plan_hash="", config={}))
except WandbFailed as error:
    print(error)
"""


def run_script(script: str, folder: Path, home: Path, **variables: str) -> str:
    """Run it in a separate process: W&B's helper process belongs to it and ends with it.

    No network: the server's address is a port where nothing listens. Warnings are errors there as well.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"HOME": str(home), "WANDB_BASE_URL": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    env |= {"WANDB_CACHE_DIR": str(home / "cache"), "WANDB_CONFIG_DIR": str(home / "config")}
    env |= variables
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: a 7-byte header, then LevelDB log blocks of 32 KiB that hold protobuf messages."""
    # Its stubs are chosen for the protobuf that is installed.
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # pyright: ignore[reportAttributeAccessIssue]
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, pending = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, piece = struct.unpack_from("<IHB", data, at)
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if piece in (1, 4):  # a whole record, or the last piece of one
            record = new_record()
            record.ParseFromString(pending)
            pending = b""
            yield record


def of_kind(found: list[Any], kind: str) -> list:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def values(items) -> dict[str, object]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """The run folder of two sessions, the second one resumed at step 2, and the records of each."""
    folder = tmp_path_factory.mktemp("run")
    run_script(TWO_SESSIONS, folder, tmp_path_factory.mktemp("home"))
    # A folder is named by the second it was made in; two sessions in one second would share it, four steps take longer.
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return folder, [list(records(path)) for path in files]


def test_the_spec_names_a_build_and_a_config_that_exist():
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{WandbConfig.__module__}:{WandbConfig.__qualname__}"


def test_a_resumed_run_is_the_same_wandb_run(sessions: tuple[Path, list[list[Any]]]):
    folder, result = sessions
    kept = json.loads((folder / "wandb" / "unirl-run.json").read_text())
    assert [of_kind(records, "run")[0].run_id for records in result] == [kept["id"], kept["id"]]


def test_name_project_tags_and_recipe_reach_wandb(sessions: tuple[Path, list[list[Any]]]):
    run = of_kind(sessions[1][0], "run")[0]
    assert (run.display_name, run.project, list(run.tags)) == ("first", "shapes", ["cpu", "tiny"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["run"] == {"max_steps": 4}
    assert config["plan_hash"] == "abc"


def test_every_number_is_over_the_step_axis_which_goes_on_after_the_resume(
    sessions: tuple[Path, list[list[Any]]],
):
    axis = {(m.glob_name or m.name): m.step_metric for m in of_kind(sessions[1][0], "metric")}
    assert axis == {"step": "", "*": "step"}
    points = [
        (row["step"], row["reward_mean"])
        for result in sessions[1]
        for row in (values(history.item) for history in of_kind(result, "history"))
        if "reward_mean" in row
    ]
    assert points == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_images_are_saved_with_their_captions_and_at_most_max_images(sessions: tuple[Path, list[list[Any]]]):
    folder, result = sessions
    rows = [values(history.item) for history in of_kind(result[0], "history")]
    (row,) = [row for row in rows if any(key == "eval" or key.startswith("eval/_") for key in row)]
    text = json.dumps(row)
    assert row["step"] == 2
    assert "a cat | reward 0.10" in text and "a dog | reward 0.20" in text
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/eval_*.png"))) == 2


def test_texts_are_a_table_of_at_most_max_texts_whole_rows(sessions: tuple[Path, list[list[Any]]]):
    folder, result = sessions
    rows = [values(history.item) for history in of_kind(result[0], "history")]
    (row,) = [row for row in rows if any(key.startswith("eval/texts") for key in row)]
    assert row["step"] == 2
    (file,) = folder.glob("wandb/offline-run-*/files/media/table/eval/texts_*.table.json")
    table = json.loads(file.read_text(encoding="utf-8"))
    assert table["columns"] == ["prompt", "text", "reward", "truncated"]
    assert table["data"] == [
        ["2 + 2", "4", 1.0, False],
        ["a | reward 0", "two\r\nlines 四", -0.5, True],
        ["empty", "", 0.25, False],
    ]


@pytest.mark.parametrize(("name", "kind", "suffix"), [("image", "image-file", "png"), ("video", "video-file", "gif")])
def test_children_are_a_table_beside_their_prompt_and_parent(
    sessions: tuple[Path, list[list[Any]]], name: str, kind: str, suffix: str
):
    folder, result = sessions
    # W&B shows tables out of artifacts; what is to be uploaded of one is listed in its manifest.
    path = f"train/{name}/samples.table.json"
    manifests = [{c.path: c.local_path for c in one.manifest.contents} for one in of_kind(result[0], "artifact")]
    (files,) = [files for files in manifests if path in files]
    table = json.loads(Path(files[path]).read_text(encoding="utf-8"))
    assert table["columns"] == ["prompt", "rewrite", name, "reward", "truncated"]
    # At most max_images, both of the first parent.
    assert [(*row[:2], *row[3:]) for row in table["data"]] == [("ring", "a red ring", 0.5, False)] * 2
    for cell in (row[2] for row in table["data"]):
        assert cell["_type"] == kind and cell["path"].endswith(f".{suffix}")
        with Image.open(files[cell["path"]]) as picture:
            assert picture.size == (8, 8)
    (texts,) = folder.glob("wandb/offline-run-*/files/media/table/train/rewrite/texts_*.table.json")
    assert json.loads(texts.read_text(encoding="utf-8"))["data"] == [
        ["ring", "a red ring", None, False],
        ["disk", "a disk", None, False],
    ]


def test_videos_are_animations_with_their_captions(sessions: tuple[Path, list[list[Any]]]):
    folder, _ = sessions
    # Both videos that are shown have the same frames, and so one file.
    (file,) = folder.glob("wandb/offline-run-*/files/media/videos/clips_*.gif")
    with Image.open(file) as animation:
        assert (animation.n_frames, animation.size, animation.info["duration"]) == (4, (8, 8), 200)


def test_findings_and_status_are_in_the_summary_and_a_failed_run_exits_with_1(
    sessions: tuple[Path, list[list[Any]]],
):
    for result, status, code in zip(sessions[1], ("failed", "done"), (1, 0), strict=True):
        summary: dict[str, object] = {}
        for record in of_kind(result, "summary"):
            summary |= values(record.update)
        assert summary["status"] == status
        assert summary["findings"] == ["step 2: small gradient"]
        assert of_kind(result, "exit")[0].exit_code == code


def test_disabled_writes_nothing_and_a_run_that_cannot_start_says_what_to_do(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    written, message = run_script(DISABLED_THEN_NOT_LOGGED_IN, folder, tmp_path).splitlines()
    assert written == "[]"
    assert "mode 'online', project 'shapes'" in message
    assert "API key" in message and '"wandb login"' in message and "mode=offline" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WandbConfig(mode="of-line"), "tracker.wandb.mode: got 'of-line', expected one of online, offline"),
        (WandbConfig(init_timeout_s=0), "tracker.wandb.init_timeout_s: got 0, expected more than 0"),
        (WandbConfig(max_images=0), "tracker.wandb.max_images: got 0, expected 1 or more"),
        (WandbConfig(max_texts=0), "tracker.wandb.max_texts: got 0, expected 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_key(config: WandbConfig, message: str):
    with pytest.raises(RecipeError, match=message):
        build(config)


STARTED = """
import json, sys
from pathlib import Path

from unirl.core.roles import RunInfo
from unirl.trackers.wandb.config import WandbConfig
from unirl.trackers.wandb.tracker import build

folder = Path(sys.argv[1])
for config in (WandbConfig(), WandbConfig(mode="offline", project="ours", name="mine", tags=["t"])):
    tracker = build(config)
    tracker.start(RunInfo(name="first", folder=folder, plan_hash="", config={}))
    own = tracker._run.settings
    values = [own.mode, own.project, own.run_name, list(own.run_tags or ()), own.root_dir, own.silent]
    print(json.dumps(values))
    tracker.finish("done")
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WANDB_MODE": "offline"}, ["offline", "unirl", "first", [], "<run>", True]),
        (
            {"WANDB_MODE": "disabled", "WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_TAGS": "a,b"},
            ["disabled", "p", "n", ["a", "b"], gettempdir(), True],
        ),
        (
            {"WANDB_MODE": "offline", "WANDB_DIR": "<elsewhere>", "WANDB_SILENT": "false"},
            ["offline", "unirl", "first", [], "<elsewhere>", False],
        ),
    ],
)
def test_variables_of_wandb_win_over_our_defaults_and_the_recipe_over_them(
    tmp_path: Path, variables: dict[str, str], expected: list[object]
):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    filled = json.loads(
        json.dumps([variables, expected]).replace("<elsewhere>", str(elsewhere)).replace("<run>", str(folder))
    )
    lines = run_script(STARTED, folder, tmp_path, **filled[0]).splitlines()
    by_variables, by_recipe = [json.loads(line) for line in lines if line.startswith("[")]
    assert by_variables == filled[1]
    assert by_recipe[:4] == ["offline", "ours", "mine", ["t"]]
