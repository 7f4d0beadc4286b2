"""Run folders of someone else: one error with file and line, or a page; never a traceback, nor a file from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.trackers.report.curves import PANELS
from unirl.trackers.report.history import RunFolderError, read_history
from unirl.trackers.report.media import open_picture
from unirl.trackers.report.theme import LIGHT
from unirl.trackers.report.write import write_report

STAGE = {
    **{"name": "a", "parent": None, "samples": 2, "medium": "text", "learner": "w", "model": "m", "engine": "e"},
    **{"algorithm": "grpo", "rewards": ["r"], "credit": "none"},
}
START = {
    **{"kind": "run_started", "step": 0, "time": 1.5, "name": "n", "recipe": "r", "plan_hash": "h", "steps": 2},
    **{"resolved": {"run": {"seed": 1}}, "versions": {"unirl-core": "1"}, "predicted": {"image": {"rows": 3}}},
    "stages": [STAGE],
    "evaluation": {"seed": 7, "policy": "live", "stages": {"a": {"kernel": "euler", "eta": 0.0}}},
}
STEP = {"kind": "step", "step": 1, "time": 2.5, "metrics": {"loss": 0.5}, "phases": {"train": 0.25}}
EVALUATED = {**STEP, "kind": "evaluated", "step": 0}
SAVED = {"kind": "checkpoint_saved", "step": 1, "time": 3.5, "folder": "f", "size_bytes": 3, "seconds": 0.5}
FINDING = {"kind": "finding", "step": 1, "time": 3.5, "text": "t"}
FINISHED = {"kind": "run_finished", "step": 1, "time": 4.5, "status": "done", "wall_s": 3.0}
SAMPLE = {"file": "a.png", "prompt": "p", "reward": 1.0, "is_truncated": False, "parent": None, "inputs": ["b.png"]}
IMAGES = {"kind": "images", "step": 0, "time": 2.0, "key": "eval", "samples": [SAMPLE], "num_left_out": 0}
HUGE = 10**400
"""Past the largest floating-point number."""


def changed(values: Any, path: tuple[Any, ...], value: object) -> Any:
    """`values` with another one at this path."""
    if not path:
        return value
    if isinstance(values, list):
        return [changed(one, path[1:], value) if at == path[0] else one for at, one in enumerate(values)]
    here = values or {}
    return {**here, path[0]: changed(here.get(path[0]), path[1:], value)}


def write(folder: Path, *events: Mapping[str, Any], media: Mapping[str, Any] | None = IMAGES) -> Path:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (folder / "media").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(folder / "media" / name)
    if media is not None:
        (folder / "media" / "index.jsonl").write_text(f"{json.dumps(media)}\n")
    return folder


def test_held_out_curves_are_scores_and_no_components_of_rewards(tmp_path: Path) -> None:
    """A reward may be named like a metric, or end in one."""
    metrics = {"a/score_mean": 0.5, "a/clip_score_mean": 0.5, "a/reward/clip_score_mean": 0.5, "a/reward/score_mean": 1}
    history = read_history(write(tmp_path, START, changed(EVALUATED, ("metrics",), metrics), media=None))
    axes = Figure().add_subplot()
    assert dict(PANELS)["Held-out prompts"](axes, history, LIGHT)
    assert [line.get_label() for line in axes.lines] == ["a: mean score"]


def test_the_run_that_the_attacks_change_has_a_page(tmp_path: Path) -> None:
    write_report(write(tmp_path, START, STEP, EVALUATED, SAVED, FINDING, FINISHED), is_running=True)
    assert "<h1>n</h1>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("event", "path", "value", "says"),
    [
        *((START, (key,), 3, f"{key}: got 3, expected a text") for key in ("name", "recipe", "plan_hash")),
        (START, ("name",), None, "name: got None, expected a text"),
        (START, ("steps",), HUGE, "steps: got 1000"),
        (START, ("steps",), "2", "steps: got '2', expected a whole number"),
        (START, ("resolved",), [], "resolved: got a list, expected an object"),
        (START, ("resolved", *["a"] * 60), 1, "resolved: got an object, expected at most 50 levels"),
        (START, ("versions",), "1", "versions: got '1', expected an object"),
        (START, ("versions", "unirl-core"), 1, "versions.unirl-core: got 1, expected a text"),
        (START, ("predicted", "image"), 1, "predicted.image: got 1, expected an object"),
        (START, ("predicted", "image", "rows"), "3", "predicted.image.rows: got '3', expected a number"),
        (START, ("predicted", "image", "rows"), float("nan"), "predicted.image.rows: got nan, expected 0 to 1e+100"),
        (START, ("stages",), {}, "stages: got an object, expected a list"),
        (START, ("stages",), [1], "stages: got a list, expected a list of objects"),
        (START, ("stages",), [STAGE] * 101, "stages: got 101, expected at most 100"),
        (START, ("stages", 0, "rewards"), [1], "stages[0].rewards: got a list, expected a list of texts"),
        (START, ("stages", 0, "name"), ["a"], "stages[0].name: got a list, expected a text"),
        (START, ("stages", 0, "parent"), 1, "stages[0].parent: got 1, expected a text"),
        (START, ("evaluation", "seed"), [7], "evaluation.seed: got a list, expected a text or a number"),
        (
            START,
            ("evaluation", "stages", "a", "eta"),
            None,
            "evaluation.stages.a.eta: got None, expected a text or a n",
        ),
        (EVALUATED, ("samples",), -1, "samples: got -1, expected a whole number"),
        (STEP, ("metrics",), None, "metrics: got None, expected an object"),
        (STEP, ("metrics",), [0.5], "metrics: got a list, expected an object"),
        (STEP, ("metrics", "loss"), "0.5", "metrics.loss: got '0.5', expected a number"),
        (STEP, ("metrics", "loss"), True, "metrics.loss: got True, expected a number"),
        (STEP, ("metrics", "loss"), HUGE, "metrics.loss: got 1000"),
        (EVALUATED, ("metrics", "loss"), {}, "metrics.loss: got an object, expected a number"),
        *((STEP, ("phases", "train"), value, "phases.train: got") for value in (-1, float("nan"), 1e300, None)),
        (SAVED, ("folder",), 3, "folder: got 3, expected a text"),
        (SAVED, ("size_bytes",), "3", "size_bytes: got '3', expected a number"),
        (SAVED, ("seconds",), float("inf"), "seconds: got inf, expected 0 to 1e+12"),
        (FINDING, ("text",), None, "text: got None, expected a text"),
        (FINISHED, ("status",), {}, "status: got an object, expected a text"),
        (FINISHED, ("wall_s",), -3, "wall_s: got -3, expected 0 to 1e+12"),
    ],
)
def test_a_value_that_is_no_value_of_a_run_is_refused_with_file_line_and_key(
    tmp_path: Path, event: dict[str, Any], path: tuple[Any, ...], value: object, says: str
) -> None:
    events = [START, STEP, EVALUATED, SAVED, FINDING, FINISHED]
    at = events.index(event)
    events[at] = changed(event, path, value)
    with pytest.raises(RunFolderError, match=re.escape(f"events.jsonl:{at + 1}: {says}")):
        read_history(write(tmp_path, *events))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("key",), 3, "key: got 3, expected a text"),
        (("samples",), {}, "samples: got an object, expected a list"),
        (("samples", 0), "a.png", "samples: got a list, expected a list of objects"),
        (("num_left_out",), "0", "num_left_out: got '0', expected a whole number"),
        (("samples", 0, "prompt"), None, "samples[0].prompt: got None, expected a text"),
        (("samples", 0, "reward"), "1", "samples[0].reward: got '1', expected a number"),
        (("samples", 0, "is_truncated"), 1, "samples[0].is_truncated: got 1, expected true or false"),
        (("samples", 0, "inputs"), "b.png", "samples[0].inputs: got 'b.png', expected a list"),
        (("samples", 0, "media"), [{"role": "source"}], "samples[0].media[0].modality: got none, expected a text"),
        (("samples", 0, "file"), "gone.png", "index.jsonl:1: it names gone.png, which is missing"),
        (("samples", 0, "file"), "a\0.png", "samples[0].file: got 'a\\x00.png', expected a file in"),
        *(
            (("samples", 0, *key), value, f"samples[0].file: got {name!r}, expected a file in")
            for name in ("../key.txt", "/etc/hostname", "link.png", "film.png")
            for key, value in ((("file",), name), (("inputs",), [name]))
        ),
        (("samples",), [SAMPLE, SAMPLE], "it names a.png twice"),
    ],
)
def test_samples_that_are_none_of_the_run_are_refused(
    tmp_path: Path, path: tuple[Any, ...], value: object, says: str
) -> None:
    """`film.png` is a strip whose animation is a link."""
    (tmp_path / "key.txt").write_text("secret")
    write(tmp_path, START, STEP, media=changed(IMAGES, path, value))
    (tmp_path / "media" / "link.png").symlink_to("../key.txt")
    (tmp_path / "media" / "film.png").write_bytes((tmp_path / "media" / "a.png").read_bytes())
    (tmp_path / "media" / "film.webp").symlink_to("../key.txt")
    with pytest.raises(RunFolderError, match=re.escape(says)) as caught:
        read_history(tmp_path)
    assert "index.jsonl" in str(caught.value) and "secret" not in str(caught.value)


def test_samples_in_folders_that_are_links_are_read_where_they_lie_inside(tmp_path: Path) -> None:
    """The same folder is asked twice, as of many samples."""
    write(tmp_path, START, STEP, media=changed(IMAGES, ("samples",), [changed(SAMPLE, ("file",), "own/a.png")]))
    media = tmp_path / "media"
    (media / "real").mkdir()
    (media / "a.png").rename(media / "real/a.png")
    (media / "own").symlink_to("real")
    (sample,) = read_history(tmp_path).media[0].samples
    assert sample.file == media / "own/a.png"
    outside = tmp_path / "outside"
    (media / "real").rename(outside)
    (media / "own").unlink()
    (media / "own").symlink_to(outside)
    with pytest.raises(RunFolderError, match=re.escape("samples[0].file: got 'own/a.png', expected a file in")):
        read_history(tmp_path)


@pytest.mark.parametrize("content", [b"secret", b"", b"\x89PNG\r\n\x1a\n", b"bomb"])
def test_an_image_that_cannot_be_shown_is_named(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sample,) = read_history(write(tmp_path, START, STEP)).media[0].samples
    if content == b"bomb":
        # Pillow refuses twice as many, here more than 14 of 16.
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    else:
        sample.file.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"a\.png: it cannot be read as an image"):
        open_picture(sample.file)


def test_a_text_that_cannot_be_shown_is_named(tmp_path: Path) -> None:
    (sample,) = read_history(write(tmp_path, START, STEP, media={**IMAGES, "kind": "texts"})).media[0].samples
    sample.file.write_bytes(b"\xff\xfe")
    with pytest.raises(RunFolderError, match=r"a\.png: it cannot be read as a text"):
        _ = sample.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "got a list, expected a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ('{"resolved": 3}', "resolved: got 3, expected an object"),
        ('{"origins": {"run.seed": "default"}}', "origins.run.seed: got 'default', expected a list"),
        ('{"origins": {"run.seed": ["default"]}}', "origins.run.seed: got 1 texts, expected source and detail"),
    ],
)
def test_a_recipe_that_is_none_is_refused(tmp_path: Path, content: str, says: str) -> None:
    write(tmp_path, START, STEP)
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(RunFolderError, match=rf"recipe\.json: {re.escape(says)}"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"pairs": "2"}, "tracker.x: pairs: got '2', expected a whole number"),
        ({"pairs": [1]}, "tracker.x: pairs: got a list, expected a whole number"),
        ({"pairs": HUGE}, "tracker.x: pairs: got 1000"),
        ({"pairs": 0}, "tracker.x.pairs: got 0, expected 1 or more"),
        ({"colour": 1}, "tracker keys that this report does not know: colour"),
    ],
)
def test_recorded_settings_of_the_report_that_it_cannot_have_are_refused(
    tmp_path: Path, section: dict[str, Any], says: str
) -> None:
    start = {**START, "resolved": {"tracker": {"x": {"use": "report", **section}, "y": None, "z": 3}}}
    with pytest.raises(RecipeError, match=re.escape(says)):
        write_report(write(tmp_path, start, STEP), is_running=True)


ODD = 'a$\\frac{<script>alert(1)</script>}$_^{\n"\x00\u202e\ud800' + "x" * 1000


def test_odd_names_and_numbers_have_a_page_without_markup_of_theirs(tmp_path: Path) -> None:
    """No formula for matplotlib, no tag, no line break where there is one line, nothing that no curve can show."""
    values = (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.0)
    names = (
        "loss",
        "kl",
        "logp_mismatch_max",
        "grad_norm",
        "reward_mean",
        "reward_std",
        "clip_fraction",
        f"reward/{ODD}",
    )
    steps = [
        {**STEP, "step": at, "metrics": dict.fromkeys(names, value), "phases": {ODD: 0.5}}
        for at, value in enumerate(values, start=2**53 - 9)
    ]
    evaluations = [
        {**EVALUATED, "step": at, "metrics": dict.fromkeys(("score_mean", f"{ODD}/score_mean"), value)}
        for at, value in enumerate(values)
    ]
    start = {
        **START,
        **{"name": ODD, "recipe": ODD, "plan_hash": ODD, "steps": 2**53, "versions": {ODD: ODD}},
        **{"predicted": {ODD: {"generate_share": 1e100, "stored_bytes": 1e100}}},
        "stages": [{**STAGE, "name": ODD, "model": ODD, "rewards": [ODD]}, {**STAGE, "name": "b", "parent": ODD}],
        "evaluation": {ODD: ODD, "stages": {ODD: {ODD: ODD}, "b": {"eta": float("nan")}}},
        "resolved": {"algorithm": 3, "data": [], "tracker": None, ODD: ODD},
    }
    media = changed(changed(IMAGES, ("samples", 0, "prompt"), ODD), ("samples", 0, "reward"), float("inf"))
    ended = [{**FINDING, "text": ODD}, {**SAVED, "folder": ODD}, {**FINISHED, "status": ODD, "step": 2**53}]
    write_report(write(tmp_path, start, *evaluations, *steps, *ended, media=media), is_running=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page and "<script" not in page
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width == 2028


def test_the_command_shows_one_error_of_a_foreign_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, START, changed(STEP, ("metrics", "loss"), "low"))
    with pytest.raises(SystemExit) as caught:
        main(["report", str(tmp_path)])
    message = " ".join(capsys.readouterr().err.split())
    assert caught.value.code == 2 and "Traceback" not in message
    assert "events.jsonl:2: metrics.loss: got 'low', expected a number" in message
    assert not (tmp_path / "report.html").exists()
