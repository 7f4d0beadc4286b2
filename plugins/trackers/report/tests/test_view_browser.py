"""`unirl view` in Chromium, on runs that were trained and on hundreds that were written by hand."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect
from small_runs import run
from unirl.trackers.report.view.library import Library
from unirl.trackers.report.view.server import start_server
from unirl.trackers.report.view.static_page import write_static
from view_runs import END, start, step, with_samples, write

pytestmark = pytest.mark.slow

SMALL = (
    "run.media_every=1",
    "data.prompts_per_step=2",
    "eval.num_prompts=2",
    "eval.every=2",
    "run.threads=1",
    "run.keep=0",
)
IMAGES = (
    *SMALL,
    "run.max_steps=2",
    "data.samples_per_prompt=2",
    "eval.samples_per_prompt=2",
    "advantage.constant_reward=skip",
)
JOINT = (*SMALL, "run.max_steps=1", "stages.rewrite.samples=4", "stages.image.samples=2", "eval.samples_per_prompt=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one stage, a copy of it with another seed, and a run of a writer and a painter."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        # Drawing the report takes most of the time, and the view needs its samples alone.
        patch.setattr("unirl.trackers.report.tracker.write_report", lambda *_, **__: None)
        run(folder / "seed-0", *IMAGES, small=())
        run(folder / "joint", *JOINT, recipe="quickstart-enhancer-joint", small=())
    shutil.copytree(folder / "seed-0", folder / "seed-1")
    events = folder / "seed-1" / "events.jsonl"
    text = events.read_text()
    assert '"seed":0,' in text
    events.write_text(text.replace('"seed":0,', '"seed":1,').replace("seed-0", "seed-1"))
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with start_server(Library([folder]), host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def address(url: str, tab: str, *runs: str) -> str:
    return f"{url}#{urlencode([('tab', tab), *(('run', name) for name in runs)])}"


def look_at_everything(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    expect(page.get_by_role("row", name="seed-0")).to_contain_text("2 of 2")
    expect(page.get_by_role("row", name="joint")).to_contain_text("grpo, flow-grpo")
    page.get_by_label("filter").fill("joint")
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    page.get_by_role("button", name="choose none").click()
    page.get_by_label("filter").fill("")
    for name in ("seed-0", "seed-1"):
        page.get_by_label(f"choose {name}", exact=True).check()

    page.get_by_role("button", name="Curves").click()
    reward = page.locator("figure", has=page.get_by_text("reward_mean", exact=True))
    expect(reward.locator("path.curve")).to_have_count(2)
    page.get_by_label("smoothing").select_option(label="half-life 2 steps")
    expect(reward.locator("path.curve.faint")).to_have_count(2)
    reward.locator("svg").hover()
    expect(reward.locator(".readout")).to_contain_text("seed-1")

    page.get_by_role("button", name="Recipes").click()
    expect(page.locator("#body")).to_contain_text("2 settings differ")
    expect(page.get_by_role("row", name="run.seed")).to_contain_text("01")

    page.get_by_role("button", name="Time and memory").click()
    expect(page.get_by_role("row", name="generate")).to_contain_text("%")
    page.get_by_role("button", name="Findings").click()
    expect(page.locator("#body h2").first).to_have_text("seed-0")

    page.get_by_role("button", name="Samples").click()
    rows = page.locator("table.samples tbody tr")
    expect(rows.first.locator("td")).to_have_count(2)
    expect(page.locator("thead")).to_contain_text("step 2")
    page.locator("#step").fill("0")
    expect(page.locator("thead")).to_contain_text("step 0")
    images = page.locator("table.samples img.tile")
    assert images.count() >= 4
    for image in images.all():
        image.scroll_into_view_if_needed()
        expect(image).to_have_js_property("naturalWidth", 64)


def look_at_a_lineage(page: Page, url: str) -> None:
    page.goto("about:blank")
    page.goto(address(url, "samples", "joint"))
    page.get_by_label("samples of").select_option(label="training")
    image = page.locator("table.samples .made .sample").first
    image.click()
    dialog = page.locator("dialog")
    expect(dialog).to_contain_text("prompt")
    expect(dialog.locator("section")).to_have_count(2)
    expect(dialog.locator("section").nth(0)).to_contain_text("rewrite")
    expect(dialog.locator("section").nth(1).locator("img")).to_be_visible()
    expect(dialog).to_contain_text("unirl show")
    dialog.get_by_role("button", name="close").click()
    expect(dialog).not_to_be_visible()


def test_every_page_shows_trained_runs(page: Page, trained: Path) -> None:
    with served(trained) as url:
        look_at_everything(page, url)
        look_at_a_lineage(page, url)
        page.goto("about:blank")


def test_the_static_folder_shows_the_same_without_a_server(page: Page, trained: Path, tmp_path: Path) -> None:
    url = write_static(Library([trained]), tmp_path / "page").as_uri()
    look_at_everything(page, url)
    look_at_a_lineage(page, url)


@pytest.mark.parametrize("tab", ["runs", "curves", "recipes", "samples", "findings", "costs"])
def test_a_phone_scrolls_down_alone(page: Page, trained: Path, tab: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    with served(trained) as url:
        page.goto(address(url, tab, "seed-0", "joint"))
        expect(page.locator("#body > *").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        page.goto("about:blank")


HOSTILE = "<img src=x onerror=alert(1)> <script>alert(2)</script> \u202e&quot;' ${1} "


def test_text_of_runs_is_text(page: Page, tmp_path: Path) -> None:
    """Names, settings, metrics, findings and prompts that would be markup."""
    recipe = {"resolved": {HOSTILE: HOSTILE, "model": {"use": HOSTILE}}, "recipe": HOSTILE}
    finding = {"kind": "finding", "step": 1, "time": 102.0, "text": HOSTILE}
    events = [start(name=HOSTILE, **recipe), {**step(1), "metrics": {HOSTILE: 0.5}}, finding]
    for name in ("a", HOSTILE.replace("/", "")):
        folder = with_samples(write(tmp_path / name, *events, {**END, "status": HOSTILE}))
        index = folder / "media" / "index.jsonl"
        index.write_text(index.read_text().replace('"prompt": "p"', f'"prompt": {json.dumps(HOSTILE)}'))
    write(tmp_path / "b", start(), {**step(1), "metrics": {"loss": HOSTILE}})
    with served(tmp_path) as url:
        for tab in ("runs", "curves", "recipes", "samples", "findings", "costs"):
            page.goto("about:blank")
            page.goto(address(url, tab, "a", HOSTILE.replace("/", ""), "b"))
            expect(page.locator("#body > *").first).to_be_visible()
            assert page.locator("main script, main img[src=x]").count() == 0
            if tab != "costs":
                expect(page.locator("main")).to_contain_text("<img src=x onerror=alert(1)>")
        page.goto("about:blank")


def test_a_run_is_followed_while_it_writes(page: Page, tmp_path: Path) -> None:
    write(tmp_path / "a", start(), step(1, loss=0.5))
    with served(tmp_path) as url:
        page.goto(url)
        row = page.get_by_role("row", name="choose a")
        expect(row).to_contain_text("1 of 9")
        with (tmp_path / "a" / "events.jsonl").open("a") as file:
            file.write("".join(json.dumps(step(at, loss=1 / at)) + "\n" for at in range(2, 6)))
        expect(row).to_contain_text("5 of 9")
        write(tmp_path / "new", start(name="new"), step(1, loss=0.5))
        expect(page.locator("table.runs tbody tr")).to_have_count(2)
        shutil.rmtree(tmp_path / "a")
        expect(row).to_contain_text("events.jsonl: it is gone.")
        page.goto("about:blank")


def test_two_hundred_runs_with_a_hundred_thousand_events(page: Page, tmp_path: Path) -> None:
    for number in range(200):
        steps = (
            step(
                at,
                **{f"m{name}": math.sin(at / (7 + name)) for name in range(20)},
                reward_mean=1 - math.exp(-at / (number + 50)),
            )
            for at in range(1, 499)
        )
        write(tmp_path / f"sweep-{number // 50}" / f"run-{number:03d}", start(resolved={"n": number}), *steps, END)
    with served(tmp_path) as url:
        page.goto(url)
        expect(page.locator("table.runs tbody tr")).to_have_count(200)
        expect(page.locator("#live")).to_have_text("live", timeout=200_000)
        expect(page.locator("table.runs")).not_to_contain_text("% read")
        page.get_by_role("button", name="best").last.click()
        # The highest of 1 - exp(-498 / (number + 50)) is that of run 0.
        expect(page.locator("table.runs tbody tr").first).to_contain_text("sweep-0/run-000")
        page.get_by_label("filter").fill("sweep-3")
        expect(page.locator("table.runs tbody tr")).to_have_count(50)
        page.get_by_role("button", name="choose the shown ones").click()
        page.get_by_role("button", name="Curves").click()
        reward = page.locator("figure", has=page.get_by_text("reward_mean", exact=True))
        expect(reward.locator("path.curve")).to_have_count(24)
        page.goto("about:blank")
