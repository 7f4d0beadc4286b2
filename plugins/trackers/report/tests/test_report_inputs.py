"""Images that prompts refer to, in the report: saved once, and shown beside what the model wrote about them."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from unirl.conformance.doubles.samples import make_samples
from unirl.core.observe.events import EventStream
from unirl.core.roles import RunInfo
from unirl.core.types.data import MediaRef
from unirl.core.types.media import Media
from unirl.core.types.track import Track
from unirl.trackers.report.compare import Pair, Pairs, pair_samples
from unirl.trackers.report.config import ReportConfig
from unirl.trackers.report.contact import BETWEEN, GAP, HEAD, MARGIN, TILE, contact_sheet
from unirl.trackers.report.history import read_history
from unirl.trackers.report.media import MediaFolder, read_media
from unirl.trackers.report.tracker import build
from unirl.trackers.report.write import write_report

COLOURS = ((224, 0, 0), (0, 0, 224))


def answers(images: list[MediaRef], *values: str, rewards: list[float]) -> Track:
    """Two samples about each image, under one instruction."""
    track = make_samples(Media(kind="text", values=values), ["What is it?"] * 4, rewards)
    ids, media = ("red", "red", "blue", "blue"), tuple((images[row // 2],) for row in range(4))
    return dataclasses.replace(track, inputs=dataclasses.replace(track.inputs, ids=ids, media=media))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[MediaRef]:
    """One larger than what is kept of it."""
    folder = tmp_path_factory.mktemp("images")
    refs: list[MediaRef] = []
    for colour, size in zip(COLOURS, ((1024, 512), (40, 40)), strict=True):
        file = folder / f"{colour[0]}.png"
        Image.new("RGB", size, colour).save(file)
        refs.append(MediaRef(modality="image", role="condition", uri=str(file)))
    return refs


@pytest.fixture(scope="module")
def folder(images: list[MediaRef], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, evaluated before and after; its prompts' images are gone by the end."""
    folder = tmp_path_factory.mktemp("run")
    tracker, events = build(ReportConfig()), EventStream(folder / "events.jsonl")
    events.listen(tracker.event)
    info: dict[str, Any] = {"name": "names", "plan_hash": "0123abcd"}
    tracker.start(RunInfo(folder=folder, config={}, **info))
    events.emit("run_started", step=0, recipe="vl", resolved={}, steps=1, **info)
    tracker.samples("eval", answers(images, "a", "b", "c", "d", rewards=[0.0] * 4), step=0, lineage={})
    tracker.samples("train", answers(images, "e", "f", "g", "h", rewards=[0.5] * 4), step=0, lineage={})
    events.emit("step", step=1, metrics={"reward_mean": 0.5})
    tracker.samples("eval", answers(images, "i", "j", "k", "l", rewards=[1.0] * 4), step=1, lineage={})
    for ref in images:
        Path(ref.uri).unlink()
    events.emit("run_finished", step=1, status="done", wall_s=2.0)
    tracker.finish("done")
    events.close()
    return folder


def seen(content: Path | str) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Size and colour of an image, given as a file or as a data URI."""
    source = content if isinstance(content, Path) else io.BytesIO(base64.b64decode(content.partition(",")[2]))
    with Image.open(source) as image:
        pixel = image.convert("RGB").getpixel((image.width // 2, image.height // 2))
        assert isinstance(pixel, tuple)
        # Large images are embedded as JPEG, which is off by a level or two.
        red, green, blue = (round(level / 16) * 16 for level in pixel)
        return image.size, (red, green, blue)


def test_each_image_is_saved_once_and_scaled_down(folder: Path) -> None:
    files = sorted((folder / "media" / "inputs").iterdir())
    # 1024 x 512 with a longest edge of 512.
    assert sorted(seen(file)[0] for file in files) == [(40, 40), (512, 256)]
    for batch in read_media(folder):
        colours = [seen(file)[1] for sample in batch.samples for file in sample.inputs]
        assert colours == [COLOURS[row // 2] for row in range(4)]


def test_one_instruction_over_two_images_is_two_prompts(folder: Path) -> None:
    """Every prompt comes before any repeats."""
    pairs = pair_samples(read_history(folder), "texts", limit=3)
    assert pairs is not None
    assert [(pair.before.text, pair.after.text) for pair in pairs.shown] == [("a", "i"), ("c", "k"), ("b", "j")]


def test_the_page_shows_the_image_beside_what_was_written_about_it(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    shown = [section.partition("</section>")[0] for section in page.split("<section>")]
    (compared,) = (section for section in shown if "<h2>Texts, before and after</h2>" in section)
    figures = re.findall(r"<figure>(.*?)</figure>", compared, re.DOTALL)
    found = [
        (re.findall(r'<img[^>]*src="([^"]*)"', figure), re.findall(r'class="text"[^>]*>(\w)<', figure))
        for figure in figures
    ]
    assert [(seen(uri)[1], texts) for (uri,), texts in found] == [
        (COLOURS[0], ["a", "i"]),
        (COLOURS[1], ["c", "k"]),
        (COLOURS[0], ["b", "j"]),
        (COLOURS[1], ["d", "l"]),
    ]
    (over_time,) = (section for section in shown if "<h2>Training texts over time</h2>" in section)
    assert [seen(uri)[1] for uri in re.findall(r'<img[^>]*src="([^"]*)"', over_time)] == [
        COLOURS[row // 2] for row in range(4)
    ]


def test_the_contact_sheet_shows_the_image_of_a_prompt_before_what_was_made_of_it(
    images: list[MediaRef], tmp_path: Path
) -> None:
    """As of an edit: source, before, after. The tiles are of one colour each, black before and white after."""
    for ref, colour in zip(images, COLOURS, strict=True):
        Image.new("RGB", (40, 40), colour).save(ref.uri)
    media = MediaFolder(tmp_path, max_images=4, max_texts=4, resumed_at=None)
    for step in (0, 1):
        made = Media(kind="image", values=torch.full((4, 3, 8, 8), float(step)))
        track = dataclasses.replace(answers(images, *"abcd", rewards=[float(step)] * 4), media=made)
        media.save("eval", track, step=step)
    first, last = read_media(tmp_path)
    shown = [Pair(prompt="", before=one, after=two) for one, two in zip(first.samples, last.samples, strict=True)]
    pairs = Pairs(before_step=0, after_step=1, shown=tuple(shown), num_held_out=4)
    with Image.open(io.BytesIO(contact_sheet(pairs, title="edits"))) as sheet:
        # Middles of the boxes of the first and of the third pair, which begin after the margin.
        lefts = [MARGIN + number * (3 * (TILE + GAP) - GAP + BETWEEN) for number in (0, 2)]
        found = [
            [sheet.getpixel((left + at * (TILE + GAP) + TILE // 2, HEAD + 54 + TILE // 2)) for at in range(3)]
            for left in lefts
        ]
    assert found == [[colour, (0, 0, 0), (255, 255, 255)] for colour in COLOURS]


def test_an_index_of_an_older_report_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "media" / "step-000000").mkdir(parents=True)
    lines = [json.loads(line) for line in (folder / "media" / "index.jsonl").read_text().splitlines()]
    for sample in lines[0]["samples"]:
        del sample["inputs"]
        (tmp_path / "media" / sample["file"]).write_text("a")
    (tmp_path / "media" / "index.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (batch,) = read_media(tmp_path)
    assert [sample.inputs for sample in batch.samples] == [()] * 4


def test_held_out_numbers_are_shown_with_the_sampler_that_they_are_of(tmp_path: Path) -> None:
    """Not with that of training, which is all that the recipe has under `sampling`."""
    events = EventStream(tmp_path / "events.jsonl")
    sampler = {
        "kernel": "euler",
        "eta": 0.0,
        "num_inference_steps": 4,
        "guidance_scale": 2.5,
        "height": 64,
        "width": 32,
    }
    evaluation = {"policy": "ema", "seed": 20_000, "num_prompts": "all", "stages": {"image": sampler}}
    info = {"name": "n", "recipe": "r", "plan_hash": "h", "resolved": {"sampling": {"kernel": "flow-sde", "eta": 0.7}}}
    events.emit("run_started", step=0, evaluation=evaluation, **info)
    events.emit("evaluated", step=0, metrics={"score_mean": 0.5}, samples=32)
    events.close()
    write_report(tmp_path, is_running=True)
    page = html.unescape(re.sub(r"<[^>]*>", "", (tmp_path / "report.html").read_text()))
    shown = " ".join(page.partition("not that of training:")[2].partition("recipe")[0].split())
    assert shown == (
        "policy ema, seed 20000, num_prompts all, 32 samples; kernel euler, eta 0, num_inference_steps 4, "
        "guidance_scale 2.5, height 64, width 32."
    )
