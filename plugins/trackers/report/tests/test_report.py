"""The report of runs whose events went through the real event stream."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageDraw, ImageFont
from unirl.conformance.doubles.samples import make_samples
from unirl.core.errors import RecipeError
from unirl.core.observe.events import EventStream
from unirl.core.roles import RunInfo
from unirl.core.types.media import Media
from unirl.trackers.report import plugin
from unirl.trackers.report.command import report
from unirl.trackers.report.compare import pair_samples
from unirl.trackers.report.config import ReportConfig
from unirl.trackers.report.contact import _cut
from unirl.trackers.report.curves import PANELS
from unirl.trackers.report.history import RunFolderError, read_history
from unirl.trackers.report.media import MediaFolder, read_media
from unirl.trackers.report.page import bytes_text, duration, number
from unirl.trackers.report.tracker import ReportTracker, build
from unirl.trackers.report.write import write_report

pytestmark = pytest.mark.slow

PROMPTS = ("a red ring", "a blue <square>")
RESOLVED = {
    "run": {"max_steps": 4, "seed": 7},
    "algorithm": {"use": "flow-grpo", "clip_range": 0.00123},
    "tracker": {"report": {"use": "report", "max_images": 3, "pairs": 2, "gallery_steps": 2, "gallery_samples": 1}},
}
PREDICTED = {
    "image": {
        "rollout_rows": 1920,
        "old_log_prob_rows": 960,
        "train_rows": 961,
        "stored_bytes": 3072,
        "generate_share": 0.25,
    }
}


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward_mean": 0.5 + step / 64,
        "reward_std": 0.125,
        "reward/shapes": 0.5 + step / 64,
        "reward/shapes/colour": 0.25 + step / 64,
        "logp_mismatch_max": step * 1e-6,
        "logp_mismatch_mean": 0.0,
        "clip_fraction": 0.0625,
        "grad_norm": 1234.5,
    }


class Run:
    """A run that sends what the loop sends, in the loop's order."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        self.events = EventStream(folder / "events.jsonl")
        self.tracker: ReportTracker = build(ReportConfig(**RESOLVED["tracker"]["report"]))
        self.events.listen(self.tracker.event)
        info = RunInfo(name="first", folder=folder, plan_hash="0123abcd", config=RESOLVED, resumed_at=resumed_at)
        self.tracker.start(info)
        self.events.emit(
            "run_started" if resumed_at is None else "run_resumed",
            step=resumed_at or 0,
            name="first",
            recipe="quickstart",
            plan_hash="0123abcd",
            resolved=RESOLVED,
            steps=4,
            predicted=PREDICTED,
            versions={"unirl-core": "0.1.0rc7"},
        )

    def images(self, key: str, step: int, *, level: float, reward: float) -> None:
        media = Media(kind="image", values=torch.full((4, 3, 8, 12), level))
        self.samples(key, media, [prompt for prompt in PROMPTS for _ in range(2)], reward=reward, step=step)

    def samples(self, key: str, media: Media, prompts: Sequence[str], *, reward: float = 1.0, step: int) -> None:
        track = make_samples(media, prompts, [reward] * len(prompts))
        self.tracker.samples(key, track, step=step, lineage={})

    def evaluate(self, step: int, *, share: float) -> None:
        self.images("eval", step, level=share, reward=share)
        metrics = {"score_mean": 0.7 + step / 64, "share_at_threshold": share, "reward/shapes": 0.7 + step / 64}
        self.events.emit("evaluated", step=step, metrics=metrics, samples=4, phases={"evaluate": 1.75})

    def step(self, done: int) -> None:
        self.images("train", done - 1, level=0.5, reward=0.5)
        phases = {"sync": 2e-6, "generate": 0.6, "score": 0.05, "train": 0.4}
        self.events.emit("step", step=done, metrics=step_metrics(done), phases=phases, samples=4)

    def save(self, step: int) -> None:
        self.events.emit("checkpoint_saved", step=step, folder=f"step-{step}", size_bytes=3 << 20, seconds=0.031)

    def end(self, step: int, status: Any = "done") -> None:
        self.events.emit("run_finished", step=step, status=status, wall_s=143.0)
        self.tracker.finish(status)
        self.events.close()


def whole_run(folder: Path) -> None:
    """Four steps, evaluated before and after."""
    run = Run(folder)
    run.evaluate(0, share=0.375)
    for step in (1, 2, 3, 4):
        run.step(step)
    run.events.finding("gradient RMS is small", step=3)
    run.evaluate(4, share=0.625)
    run.save(4)
    run.end(4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    origins = {"run.max_steps": ["command line", "run.max_steps=4"], "run.seed": ["default", "RunConfig"]}
    (folder / "recipe.json").write_text(json.dumps({"resolved": RESOLVED, "origins": origins}))
    whole_run(folder)
    return folder


class Page(HTMLParser):
    """Text, images and every address of a page; fails on tags that are not closed in order."""

    VOID = ("meta", "img", "br", "source", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.words.append(" ")
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def images(self) -> Iterable[Image.Image]:
        for _, key, value in self.attributes:
            if key in ("src", "srcset"):
                yield Image.open(io.BytesIO(base64.b64decode(value.split("base64,")[1])))


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def colors(image: Image.Image) -> int:
    result = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert result is not None
    return len(result)


def test_the_specs_name_a_build_and_a_config_that_exist():
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{ReportConfig.__module__}:{ReportConfig.__qualname__}"


def test_the_page_contains_every_number_of_the_run(finished: Path):
    text = page_of(finished).text
    for step in (1, 2, 3, 4):
        row = " ".join(number(value) for value in (step, *step_metrics(step).values(), 2e-6, 0.6, 0.05, 0.4))
        assert row in text
    headline = "score_mean 0.7 0.7625 +0.0625 share_at_threshold 0.375 0.625 +0.25"
    assert headline in text
    for expected in (
        "first done",
        "recipe quickstart",
        "0123abcd",
        "4 of 4",
        "2 min 23 s",
        "gradient RMS is small",
        "unirl-core 0.1.0rc7",
        "3 MiB",
        "31 ms",
        "3,072 (3 KiB)",
        "1,920",
        "961",
    ):
        assert expected in text, expected


def test_the_cost_split_is_shown_as_predicted_and_as_measured(finished: Path):
    text = page_of(finished).text
    # Measured: 0.6 s of generation and 0.4 s of training a step.
    assert "generate 25.0 % 60.0 %" in text
    assert "train 75.0 % 40.0 %" in text


def test_phase_times_add_up(finished: Path):
    text = page_of(finished).text
    # Four steps of 0.6 + 0.4 + 0.05 s and two evaluations of 1.75 s: 7.7 s in all.
    assert "evaluate 1.8 s 1.8 s 2 3.5 s 45.5 %" in text
    assert "generate 600 ms 600 ms 4 2.4 s 31.2 %" in text


def test_the_recipe_is_shown_with_the_origin_of_each_value(finished: Path):
    text = page_of(finished).text
    assert "run.max_steps 4 command line run.max_steps=4" in text
    assert "run.seed 7 default RunConfig" in text
    assert "algorithm.clip_range 0.00123" in text


def test_the_page_loads_nothing_from_outside(finished: Path):
    content = (finished / "report.html").read_text(encoding="utf-8")
    page = Page(content)
    addresses = [
        value for _, key, value in page.attributes if key in ("src", "srcset", "href", "action", "data", "poster")
    ]
    assert addresses and all(value.startswith("data:image/") for value in addresses)
    without_images = re.sub(r"data:image/\w+;base64,[\w+/=]+", "", content)
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<link|<iframe", without_images)
    assert ("meta", "content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    assert "prefers-color-scheme: dark" in content


def test_text_of_prompts_is_escaped(finished: Path):
    content = (finished / "report.html").read_text(encoding="utf-8")
    assert "a blue &lt;square&gt;" in content and "<square>" not in content


def test_the_page_holds_light_and_dark_curves_and_all_tiles(finished: Path):
    images = list(page_of(finished).images())
    # Two pairs, and one sample of each of two training steps.
    assert len(images) == 2 * len(PANELS) + 2 * 2 + 2
    corners = [image.convert("RGB").getpixel((2, 2)) for image in images[:2]]
    assert corners == [(0x16, 0x1B, 0x24), (255, 255, 255)]


def test_the_curves_are_a_picture_of_nine_panels(finished: Path):
    with Image.open(finished / "curves.png") as image:
        assert image.width >= 1800 and image.height >= 1300
        panels = [
            image.crop(
                (
                    c * image.width // 3,
                    80 + r * (image.height - 80) // 3,
                    (c + 1) * image.width // 3,
                    (r + 1) * (image.height - 80) // 3,
                )
            )
            for r in range(3)
            for c in range(3)
        ]
        assert all(colors(panel) > 50 for panel in panels)


def test_the_contact_sheet_has_before_left_and_after_right(finished: Path):
    with Image.open(finished / "contact_sheet.png") as image:
        assert image.width >= 900 and image.height >= 350
        # The tiles are of one grey each: 0.375 before, 0.625 after.
        before, after = round(0.375 * 255), round(0.625 * 255)
        result = image.convert("L")
        row = [result.getpixel((x, 104 + 54 + 112)) for x in range(40, 40 + 2 * 224 + 8)]
        assert row[112] == before and row[224 + 8 + 112] == after
        assert colors(image) > 20


def test_pairs_are_the_same_prompt_and_sample_in_file_order_with_every_prompt_first(finished: Path):
    pairs = pair_samples(read_history(finished), "images", limit=10)
    assert pairs is not None
    # Three of four images are saved: both samples of the first prompt, one of the second.
    assert [pair.prompt for pair in pairs.shown] == [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    assert [(pair.before.reward, pair.after.reward) for pair in pairs.shown] == [(0.375, 0.625)] * 3
    assert (pairs.before_step, pairs.after_step, pairs.num_held_out) == (0, 4, 4)


def test_images_are_saved_as_png_with_an_index(finished: Path):
    files = sorted(str(path.relative_to(finished / "media")) for path in finished.glob("media/step-*/*.png"))
    assert files[:3] == ["step-000000/eval-00.png", "step-000000/eval-01.png", "step-000000/eval-02.png"]
    assert "step-000003/train-02.png" in files and "step-000003/train-03.png" not in files
    line = json.loads((finished / "media" / "index.jsonl").read_text().splitlines()[0])
    assert (line["key"], line["step"], line["num_left_out"]) == ("eval", 0, 1)
    assert line["samples"][0] == {
        "file": "step-000000/eval-00.png",
        "sample": "trial-0",
        "prompt": "a red ring",
        "reward": 0.375,
        "is_truncated": False,
        "parent": None,
        "inputs": [],
        "media": [],
    }
    with Image.open(finished / "media" / "step-000000" / "eval-00.png") as image:
        assert image.size == (12, 8) and image.convert("RGB").getpixel((0, 0)) == (96, 96, 96)


def test_the_command_makes_the_same_report_again_and_says_where(finished: Path):
    before = {name: (finished / name).read_bytes() for name in ("report.html", "curves.png", "contact_sheet.png")}
    for name in before:
        (finished / name).unlink()
    result = CliRunner().invoke(report, [str(finished), "--json"], catch_exceptions=False)
    paths = json.loads(result.output)
    assert Path(paths["page"]) == finished / "report.html"
    assert {name: (finished / name).read_bytes() for name in before} == before
    shown = CliRunner().invoke(report, [str(finished)], catch_exceptions=False).output
    assert str(finished / "report.html") in shown


def test_a_run_that_crashed_in_the_middle_of_a_line_has_a_report_of_what_is_there(tmp_path: Path):
    run = Run(tmp_path)
    run.evaluate(0, share=0.375)
    run.step(1)
    run.step(2)
    run.events.close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    write_report(tmp_path)
    text = page_of(tmp_path).text
    assert "first unfinished" in text and "1 of 4" in text
    assert "no later evaluation yet" in text


def test_a_resumed_run_appends_and_counts_what_it_computed_again_once(tmp_path: Path):
    first = Run(tmp_path)
    first.evaluate(0, share=0.375)
    for step in (1, 2, 3):
        first.step(step)
    first.save(2)
    first.end(3, "failed")
    # A crash cuts a line; the resumed run continues in the same file.
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"st')
    second = Run(tmp_path, resumed_at=2)
    for step in (3, 4):
        second.step(step)
    second.evaluate(4, share=0.625)
    second.end(4)
    history = read_history(tmp_path)
    assert [row.step for row in history.steps] == [1, 2, 3, 4]
    assert [row.step for row in history.evaluations] == [0, 4]
    assert [(batch.key, batch.step) for batch in history.media] == [
        ("eval", 0),
        *[("train", step) for step in (0, 1, 2, 3)],
        ("eval", 4),
    ]
    assert history.wall_s == 286.0
    text = page_of(tmp_path).text
    assert "first done" in text and "after step 2" in text


def test_a_running_run_has_a_page_after_every_evaluation(tmp_path: Path):
    run = Run(tmp_path)
    run.evaluate(0, share=0.375)
    assert "first running" in page_of(tmp_path).text
    run.step(1)
    run.end(1, "stopped")
    assert "first stopped" in page_of(tmp_path).text


def test_a_run_without_held_out_prompts_or_optional_numbers_has_a_page_as_well(tmp_path: Path):
    events = EventStream(tmp_path / "events.jsonl")
    events.emit("run_started", step=0, name="bare", recipe="r", plan_hash="h")
    events.emit("step", step=1, metrics={"loss": float("nan"), "image/reward_mean": 0.5})
    events.close()
    files = write_report(tmp_path)
    assert files.contact_sheet is None
    assert "No held-out prompts were evaluated yet" in page_of(tmp_path).text
    assert list(read_history(tmp_path).series("reward_mean")) == ["image/reward_mean"]


def test_large_images_are_embedded_as_thumbnails(tmp_path: Path):
    run = Run(tmp_path)
    large = Media(kind="image", values=torch.rand(1, 3, 400, 800))
    run.samples("train", large, ["big"], step=0)
    run.end(0, "stopped")
    assert (320, 160) in [image.size for image in page_of(tmp_path).images()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no events.jsonl"),
        ("", "no start of a run"),
        ('{"kind":"step"}\n{}\n', "events.jsonl:1"),
        ('{"kind":"run_started","step":0,"time":1}\n', "events.jsonl:1: name: got none, expected a text"),
        ("oops\n{}\n", "events.jsonl:1"),
    ],
)
def test_a_folder_that_holds_no_readable_run_is_refused_by_name(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    with pytest.raises(RunFolderError, match=re.escape(message)):
        write_report(tmp_path)


def test_a_missing_image_is_named(tmp_path: Path):
    run = Run(tmp_path)
    run.step(1)
    run.end(1)
    (tmp_path / "media" / "step-000000" / "train-01.png").unlink()
    with pytest.raises(RunFolderError, match=r"it names step-000000/train-01\.png, which is missing"):
        write_report(tmp_path)


def test_counts_below_one_are_refused_with_their_key():
    with pytest.raises(RecipeError, match=r"tracker\.report\.pairs: got 0, expected 1 or more"):
        build(ReportConfig(pairs=0))


def test_numbers_durations_and_sizes_are_written_for_people():
    assert [number(v) for v in (0.0, 3, 0.00001234, 0.123456, 1234.56, 12345678.9, float("nan"))] == [
        "0",
        "3",
        "1.23e-05",
        "0.1235",
        "1,234.6",
        "1.23e+07",
        "nan",
    ]
    assert [duration(v) for v in (4e-6, 0.25, 59.94, 185, 7620)] == [
        "4 µs",
        "250 ms",
        "59.9 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
    assert [bytes_text(v) for v in (812, 3 << 20, 5 << 40)] == ["812 B", "3 MiB", "5 TiB"]


def test_a_run_that_fails_before_it_began_leaves_no_report_and_no_error(tmp_path: Path):
    tracker = build(ReportConfig())
    tracker.start(RunInfo(name="first", folder=tmp_path, plan_hash="", config=RESOLVED))
    events = EventStream(tmp_path / "events.jsonl")
    events.listen(tracker.event)
    events.emit("run_finished", step=0, status="failed", wall_s=0.1, error="no memory")
    tracker.finish("failed")
    events.close()
    assert not (tmp_path / "report.html").exists()


def test_a_video_is_a_strip_in_the_contact_sheet_and_an_animation_over_its_strip_on_the_page(tmp_path: Path):
    run = Run(tmp_path)
    # Eleven frames of rising brightness; strips show frames 0, 2, 4, 6, 8 and 10.
    frames = torch.linspace(0, 1, 11).view(1, 11, 1, 1, 1).expand(1, 11, 3, 8, 12)
    for key, step in (("eval", 0), ("train", 0), ("eval", 1)):
        run.samples(key, Media(kind="video", values=frames, rate=5.0), ["a"], step=step)
    run.end(1, "stopped")
    (sample,) = read_media(tmp_path)[0].samples
    with Image.open(sample.file) as strip:
        assert strip.size == (6 * 12, 8)
        levels = [strip.convert("RGB").getpixel((12 * at + 6, 4)) for at in range(6)]
    assert levels == [(round(255 * level),) * 3 for level in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert sample.animation is not None
    with Image.open(sample.animation) as animation:
        assert (animation.n_frames, animation.size) == (11, (12, 8))
        animation.load()
        assert animation.info["duration"] == 200
    shown = list(page_of(tmp_path).images())[2 * len(PANELS) :]
    assert [image.format for image in shown] == ["WEBP", "PNG"] * 3
    assert [image.n_frames for image in shown[::2]] == [11] * 3 and {image.size for image in shown[1::2]} == {(72, 8)}
    assert list(tmp_path.rglob("*contact*.png"))


@pytest.mark.parametrize(("prompt", "reward"), [("a | reward 1", -0.5), ("two\nlines", None), ("", None)])
def test_prompts_and_rewards_are_read_as_they_were_saved(tmp_path: Path, prompt: str, reward: float | None):
    image = Media(kind="image", values=torch.zeros(1, 3, 2, 2))
    track = make_samples(image, [prompt], None if reward is None else [reward])
    MediaFolder(tmp_path, max_images=1, max_texts=1, resumed_at=None).save("eval", track, step=0)
    (batch,) = read_media(tmp_path)
    assert [(sample.prompt, sample.reward) for sample in batch.samples] == [(prompt, reward)]


def test_text_of_any_length_is_cut_to_its_width():
    draw, font = ImageDraw.Draw(Image.new("RGB", (1, 1))), ImageFont.load_default(18)
    short = _cut(draw, "word " * 20_000, font, width=300)
    assert short.endswith("…") and draw.textlength(short, font) <= 300
    assert draw.textlength("word " * (short.count("word") + 1) + "…", font) > 300
    assert _cut(draw, "word", font, width=300) == "word"
    assert _cut(draw, "word", font, width=1) == "…"
