"""The MLflow tracker, in a database and on a real server; what is logged is read back with MLflow's own client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tracker_sessions import run_info, two_sessions
from unirl.conformance.doubles.samples import make_samples
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import Tracker
from unirl.core.types.media import Media
from unirl.trackers.mlflow import plugin
from unirl.trackers.mlflow.config import MlflowConfig
from unirl.trackers.mlflow.tracker import build

# MLflow takes seconds to be imported, and as long to make a database.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

READER = """
import json, sys
from mlflow.tracking import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
result = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        id = run.info.run_id
        files, folders = [], [""]
        while folders:
            for file in client.list_artifacts(id, folders.pop()):
                (folders if file.is_dir else files).append(file.path)
        texts = {}
        for file in files:
            if file.endswith(".json"):
                with open(client.download_artifacts(id, file), encoding="utf-8") as opened:
                    texts[file] = json.load(opened)
        result.append({
            "experiment": experiment.name, "id": id, "name": run.info.run_name, "status": run.info.status,
            "params": run.data.params, "tags": run.data.tags, "files": sorted(files), "json": texts,
            "artifacts": run.info.artifact_uri,
            "metrics": {key: [[m.step, m.value] for m in client.get_metric_history(id, key)] for key in run.data.metrics},
        })
print(json.dumps(result))
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)


def read_back(uri: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", READER, uri],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run folder of a run of four steps and its only run in MLflow: resumed at 2, so step 3 is done twice."""

    def shows(tracker: Tracker) -> None:
        texts = Media(kind="text", values=("4", "two\r\nlines 四", "left out"))
        track = make_samples(texts, ["2 + 2", "a | b", "x"], [1.0, -0.5, 0.0], truncated=[1])
        tracker.samples("eval", track, step=2, lineage={})
        parent = make_samples(Media(kind="text", values=("a red ring",)), ["ring"], name="rewrite")
        child = make_samples(
            Media(kind="image", values=torch.rand(2, 3, 8, 8)), ["ring"] * 2, name="image", parent=parent
        )
        beside = Media(kind="text", values=("a red ring",) * 2)
        tracker.samples("train/image", child, step=2, lineage={"rewrite": beside})

    folder = tmp_path_factory.mktemp("run")
    two_sessions(
        lambda: build(MlflowConfig(tags={"team": "a"}, notes="**tiny**", max_images=2, max_texts=2)),
        folder,
        shows=shows,
    )
    (run,) = read_back(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    return folder, run


def test_the_spec_names_a_build_and_a_config_that_exist() -> None:
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{MlflowConfig.__module__}:{MlflowConfig.__qualname__}"


def test_a_resumed_run_is_the_same_mlflow_run_and_repeats_no_step(sessions: tuple[Path, dict[str, Any]]) -> None:
    folder, run = sessions
    assert json.loads((folder / "mlflow" / "unirl-run.json").read_text()) == {"id": run["id"]}
    assert run["metrics"]["reward_mean"] == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert run["metrics"]["a_ b"] == [[step, 1.0] for step in (1, 2, 3, 4)]


def test_name_recipe_tags_notes_findings_and_status_reach_mlflow(sessions: tuple[Path, dict[str, Any]]) -> None:
    _, run = sessions
    assert (run["experiment"], run["name"], run["status"]) == ("unirl", "first", "FINISHED")
    assert run["params"] == {"run.max_steps": "4", "algorithm.use": "flow-grpo", "algorithm.betas": "[0.9, 0.999]"}
    assert run["json"]["recipe.json"]["algorithm"]["betas"] == [0.9, 0.999]
    expected = {
        "team": "a",
        "mlflow.note.content": "**tiny**",
        "unirl.plan_hash": "abc",
        "unirl.status": "done",
        "finding.step-000002.1": "small gradient",
    }
    assert expected.items() <= run["tags"].items()


def test_images_are_mlflows_images_by_key_and_step_once_each(sessions: tuple[Path, dict[str, Any]]) -> None:
    folder, run = sessions
    # MLflow names them `<key>+step+<step>+timestamp+...`, with ~ for a slash, and keeps a small copy beside each.
    images = [file.split("+timestamp")[0] for file in run["files"] if file.endswith(".png")]
    assert sorted(images) == sorted(
        [f"images/eval~{row:02d}+step+{step}" for step in (1, 2, 3, 4) for row in (0, 1)]
        + [f"images/train~image~{row:02d}+step+2" for row in (0, 1)]
    )
    (file,) = (folder / "mlflow" / "artifacts").rglob("eval~01+step+3+*.png")
    with Image.open(file) as picture:
        assert (picture.size, picture.getpixel((4, 4))) == ((8, 8), (153, 153, 153))


def test_samples_are_tables_of_whole_texts_with_prompt_parents_reward_and_truncation(
    sessions: tuple[Path, dict[str, Any]],
) -> None:
    folder, run = sessions
    assert run["json"]["samples/eval/texts-step-000002.json"] == {
        "columns": ["prompt", "text", "reward", "truncated"],
        "data": [["2 + 2", "4", 1.0, False], ["a | b", "two\r\nlines 四", -0.5, True]],
    }
    assert run["json"]["samples/train/image/step-000002.json"] == {
        "columns": ["prompt", "rewrite", "reward", "truncated"],
        "data": [["ring", "a red ring", None, False]] * 2,
    }
    (file,) = (folder / "mlflow" / "artifacts").rglob("samples/clips/step-000002-00.gif")
    with Image.open(file) as animation:
        assert (animation.n_frames, animation.size, animation.info["duration"]) == (4, (8, 8), 200)


def test_variables_of_mlflow_win_over_our_defaults_and_the_recipe_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    for config in (MlflowConfig(), MlflowConfig(experiment="ours", name="mine")):
        tracker = build(config)
        tracker.start(run_info(tmp_path / "run"))
        tracker.finish("failed")
    runs = {(run["experiment"], run["name"], run["status"]) for run in read_back(uri)}
    assert runs == {("theirs", "first", "FAILED"), ("ours", "mine", "FAILED")}
    assert not list((tmp_path / "run").rglob("*.db"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URI and process group of a server of MLflow."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    folder = tmp_path / "server"
    folder.mkdir()
    # One retry after a moment: as a rule MLflow tries for minutes.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
                *("--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
            ],
            cwd=folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + 120
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=2) as reply:
            if reply.status == 200:
                break
        assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.2)
    yield uri, process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_server_that_stalls_or_is_gone_does_not_stop_a_run_which_says_so_once(
    tmp_path: Path, server: tuple[str, subprocess.Popen[bytes]]
) -> None:
    uri, process = server
    events = EventStream()
    findings: list[str] = []
    events.listen(lambda event: findings.append(event.data["text"]) if event.kind == "finding" else None)
    trackers = Trackers({"mlflow": build(MlflowConfig(tracking_uri=uri))}, events)
    trackers.start(run_info(tmp_path / "run"))

    def steps(first: int, last: int) -> float:
        began = time.monotonic()
        for step in range(first, last):
            events.emit("step", step=step, metrics={"reward_mean": step / 100}, phases={}, samples=4)
        return time.monotonic() - began

    os.killpg(process.pid, signal.SIGSTOP)
    stalled_s = steps(1, 51)
    os.killpg(process.pid, signal.SIGCONT)
    # A second is far below the two minutes that MLflow waits for one answer.
    assert stalled_s < 1
    until = time.monotonic() + 60
    expected = [[step, step / 100] for step in range(1, 51)]
    while (history := read_back(uri)[0]["metrics"].get("reward_mean")) != expected and time.monotonic() < until:
        pass
    assert history == expected and not findings
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    at = 51
    while not findings and time.monotonic() < until:
        assert steps(at, at + 1) < 1
        at += 1
        time.sleep(0.1)
    steps(at, at + 20)
    trackers.finish("done", step=at)
    (finding,) = findings
    assert finding.startswith("tracker.mlflow failed and is off from here: TrackerFailed: MlflowException")


def test_a_run_does_not_start_without_its_server_and_no_password_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:hunter2@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cr3t")
    with pytest.raises(UniRLError, match=r"127\.0\.0\.1") as raised:
        build(MlflowConfig()).start(run_info(tmp_path))
    written = str(raised.value) + "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert "Traceback" in written and "hunter2" not in written and "s3cr3t" not in written


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MlflowConfig(init_timeout_s=0), "tracker.mlflow.init_timeout_s: got 0, expected more than 0"),
        (MlflowConfig(max_images=0), "tracker.mlflow.max_images: got 0, expected 1 or more"),
        (MlflowConfig(max_texts=0), "tracker.mlflow.max_texts: got 0, expected 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_key(config: MlflowConfig, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(config)
