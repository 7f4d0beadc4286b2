"""Text samples in the report: what is kept of them, and how the page shows them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.conformance.doubles.samples import make_samples
from unirl.core.observe.events import EventStream
from unirl.core.roles import RunInfo
from unirl.core.types.media import Media
from unirl.core.types.track import Track
from unirl.trackers.report.compare import pair_samples
from unirl.trackers.report.config import ReportConfig
from unirl.trackers.report.fold import SLACK, fold
from unirl.trackers.report.history import read_history
from unirl.trackers.report.media import MediaFolder, read_media
from unirl.trackers.report.tracker import build

PROMPTS = ("What is 2 + 2?", "Is 1 < 2 & 3 > 2? <script>alert(1)</script>")
LONG = "First we add.\n" + "\n".join(f"line {number} of the sum" for number in range(100)) + "\nSo it is 4."
ODD = 'two\r\nlines\n\tand <b>tags</b> & "quotes" {{ braces }} 四 عدد 🐕'
BEFORE = ("5", "", "never mind")
AFTER = (LONG, ODD, "left out")


def texts(*values: str, rewards: Sequence[float], cut: int = -1) -> Track:
    """One completion a reward, the prompts in turn; `cut` was truncated."""
    prompts = [PROMPTS[row % 2] for row in range(len(values))]
    return make_samples(Media(kind="text", values=values), prompts, rewards, truncated=[cut])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps that was evaluated before and after."""
    folder = tmp_path_factory.mktemp("run")
    config = {"use": "report", "max_texts": 2}
    tracker, events = build(ReportConfig(max_texts=2)), EventStream(folder / "events.jsonl")
    events.listen(tracker.event)
    info: dict[str, Any] = {"name": "sums", "plan_hash": "0123abcd"}
    tracker.start(RunInfo(folder=folder, config={}, **info))
    events.emit("run_started", step=0, recipe="text", resolved={"tracker": {"report": config}}, steps=2, **info)
    tracker.samples("eval", texts(*BEFORE, rewards=(0.0, 0.5, 0.0), cut=0), step=0, lineage={})
    for done in (1, 2):
        tracker.samples("train", texts(f"answer {done}", rewards=[0.25]), step=done - 1, lineage={})
        events.emit("step", step=done, metrics={"reward_mean": 0.25})
    tracker.samples("eval", texts(*AFTER, rewards=(1.0, 0.25, 0.0), cut=1), step=2, lineage={})
    # Without an `evaluated` event the page is drawn once, at the end: drawing is most of the time of these tests.
    events.emit("run_finished", step=2, status="done", wall_s=2.0)
    tracker.finish("done")
    events.close()
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_bytes().decode("utf-8")


def section(page: str, title: str) -> str:
    (result,) = re.findall(rf"<section><h2>{re.escape(title)}</h2>(.*?)</section>", page, re.DOTALL)
    return result


def shown(markup: str) -> str:
    """Text that a reader sees of it: without tags, spaces as they are."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def cards(markup: str) -> list[str]:
    return re.findall(r'<div class="card">(.*?)</div>\n?</div>', markup, re.DOTALL)


def test_texts_are_kept_whole_with_an_index(folder: Path) -> None:
    media = folder / "media"
    assert (media / "step-000002" / "eval-00.txt").read_bytes() == LONG.encode()
    assert (media / "step-000002" / "eval-01.txt").read_bytes() == ODD.encode()
    lines = [json.loads(line) for line in (media / "index.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["key"], line["step"], line["num_left_out"]) for line in lines] == [
        ("texts", "eval", 0, 1),
        ("texts", "train", 0, 0),
        ("texts", "train", 1, 0),
        ("texts", "eval", 2, 1),
    ]
    first, second = lines[0]["samples"]
    assert (first["file"], second["file"]) == ("step-000000/eval-00.txt", "step-000000/eval-01.txt")
    assert (first["prompt"], first["reward"], first["is_truncated"]) == (PROMPTS[0], 0.0, True)


def test_pairs_of_texts_are_the_same_prompt_before_and_after(folder: Path) -> None:
    history = read_history(folder)
    pairs = pair_samples(history, "texts", limit=10)
    assert pairs is not None and pair_samples(history, "images", limit=10) is None
    assert [pair.prompt for pair in pairs.shown] == list(PROMPTS)
    assert [(pair.before.text, pair.after.text) for pair in pairs.shown] == [("5", LONG), ("", ODD)]
    assert [(pair.before.reward, pair.after.reward) for pair in pairs.shown] == [(0.0, 1.0), (0.5, 0.25)]
    assert [(pair.before.is_truncated, pair.after.is_truncated) for pair in pairs.shown] == [
        (True, False),
        (False, True),
    ]
    assert (pairs.before_step, pairs.after_step, pairs.num_held_out) == (0, 2, 3)


def test_the_page_shows_prompt_text_reward_and_truncation_side_by_side(page: str) -> None:
    result = section(page, "Texts, before and after")
    assert "before (step 0)" in result and "after (step 2)" in result and "2 of 3 samples" in result
    figures = re.findall(r"<figure>(.*?)</figure>", result, re.DOTALL)
    assert [shown(re.findall(r"<figcaption.*?>(.*?)</figcaption>", f, re.DOTALL)[0]) for f in figures] == list(PROMPTS)
    (first, second), (third, fourth) = (cards(figure) for figure in figures)
    assert shown(first).split() == ["before", "0.00", "truncated", "5"]
    assert shown(second).split()[:2] == ["after", "1.00"] and "truncated" not in shown(second)
    assert shown(third).split() == ["before", "0.50", "no", "text"]
    # The text is there space by space.
    assert shown(fourth).startswith("after 0.25") and shown(fourth).endswith(f"truncated\n{ODD}")
    # Better and worse than before.
    assert 'class="good"' in second and 'class="bad"' in fourth


def test_texts_and_prompts_are_escaped(page: str) -> None:
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page
    assert "&lt;b&gt;tags&lt;/b&gt; &amp; &#34;quotes&#34; {{ braces }}" in page and "<b>tags" not in page


def test_a_long_text_is_folded_and_whole_inside(page: str) -> None:
    result = section(page, "Texts, before and after")
    (summary, rest) = re.findall(r'<details class="fold"><summary>(.*?)</summary>(.*?)</details>', result, re.DOTALL)[0]
    assert html.unescape(rest) == LONG
    glance = shown(re.findall(r'<span class="closed">(.*)</span><span', summary, re.DOTALL)[0])
    assert glance.startswith("First we add.") and glance.endswith("So it is 4.") and len(glance) < 800
    assert f"all {len(LONG):,} characters" in glance


def test_training_texts_are_shown_over_time(page: str) -> None:
    result = section(page, "Training texts over time")
    assert re.findall(r"<h3>(.*?)</h3>", result) == ["after 0 steps", "after 1 steps"]
    for done, card in enumerate(
        re.findall(r'<div class="card">.*?</div></div>|<div class="card">.*?answer \d', result, re.S)
    ):
        assert shown(card).split("\n")[0].startswith(PROMPTS[0])
        assert "0.25" in shown(card) and f"answer {done + 1}" in shown(card)


def test_texts_that_a_resumed_run_makes_again_count_once(tmp_path: Path) -> None:
    first = MediaFolder(tmp_path, max_images=1, max_texts=1, resumed_at=None)
    for step in (0, 1, 2, 3):
        first.save("train", texts(f"first {step}", rewards=[0.5]), step=step)
    second = MediaFolder(tmp_path, max_images=1, max_texts=1, resumed_at=1)
    second.save("train", texts("second 2", rewards=[0.75]), step=2)
    result = [(batch.step, batch.samples[0].text, batch.samples[0].reward) for batch in read_media(tmp_path)]
    assert result == [(0, "first 0", 0.5), (1, "first 1", 0.5), (2, "second 2", 0.75)]


def test_images_and_texts_of_one_key_and_step_are_both_kept(tmp_path: Path) -> None:
    media = MediaFolder(tmp_path, max_images=1, max_texts=1, resumed_at=None)
    media.save("eval", texts("a text", rewards=[0.5]), step=0)
    media.save("eval", make_samples(Media(kind="image", values=torch.zeros(1, 3, 2, 2)), ["a"], [1.0]), step=0)
    result = [(batch.kind, batch.samples[0].file.name, batch.samples[0].reward) for batch in read_media(tmp_path)]
    assert result == [("images", "eval-00.png", 1.0), ("texts", "eval-00.txt", 0.5)]


@pytest.mark.parametrize(
    ("length", "head", "tail", "shown", "hidden"),
    [
        (0, 0, 0, (0,), 0),
        # A few characters more than the glance are not worth a fold.
        (400 + SLACK, 400 + SLACK, 0, (400 + SLACK,), 0),
        # Three quarters of the glance are the beginning.
        (401 + SLACK, 300, 100, (401 + SLACK,), 0),
        (1000, 300, 100, (1000,), 0),
        (1001, 300, 100, (500, 500), 1),
        (5000, 300, 100, (500, 500), 4000),
    ],
)
def test_a_fold_shows_both_ends_and_counts_what_it_leaves_out(
    length: int, head: int, tail: int, shown: tuple[int, ...], hidden: int
) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(length))
    folded = fold(text, glance=400, most=1000)
    assert (len(folded.head), len(folded.tail)) == (head, tail)
    assert text.startswith(folded.head) and text.endswith(folded.tail)
    assert tuple(len(piece) for piece in folded.shown) == shown
    assert text.startswith(folded.shown[0]) and text.endswith(folded.shown[-1])
    assert (folded.num_characters, folded.num_hidden) == (length, hidden)
