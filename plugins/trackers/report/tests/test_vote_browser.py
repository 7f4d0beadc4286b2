"""`unirl vote` in Chromium, with the keyboard alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from unirl.trackers.report.history import read_history
from unirl.trackers.report.vote.pairs import held_out_pairs
from unirl.trackers.report.vote.server import start_server
from unirl.trackers.report.vote.session import VotingSession
from unirl.trackers.report.vote.votes_file import VotedRun, opened, read_votes
from view_runs import END, start, step, with_images, write

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)> <script>alert(2)</script> \u202e&quot;' ${1}"


def two_runs(folder: Path, *, size: int = 64) -> tuple[Path, Path]:
    folders = folder / "before-training", folder / "after-training"
    for number, one in enumerate(folders):
        write(one, start(evaluation={"seed": 3}), step(1, loss=0.5), END)
        rows = [
            {"sample": f"r0/p/{n}", "prompt": HOSTILE, "colour": 60 * n + 200 * 256 * number, "size": size}
            for n in range(4)
        ]
        with_images(one, "eval", 1, rows)
    return folders


@contextmanager
def served(folders: Sequence[Path], votes: Path) -> Iterator[str]:
    one, other = map(read_history, folders)
    pairs = held_out_pairs(one, other, seed=0)
    runs = [VotedRun(folder=folder, began=float(number)) for number, folder in enumerate(folders)]
    with (
        opened(votes, runs, pairs, seed=0) as file,
        start_server(VotingSession(pairs, file), host="127.0.0.1", port=0) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def shown_green(page: Page) -> list[int]:
    """The green of the middle pixel of both images, as they are drawn."""
    return page.evaluate(
        """() => Array.from(document.querySelectorAll('.side img'), (image) => {
          const canvas = document.createElement('canvas');
          const context = canvas.getContext('2d');
          context.drawImage(image, 0, 0);
          return context.getImageData(2, 2, 1, 1).data[1];
        })"""
    )


def test_votes_with_the_keyboard_go_to_the_image_that_was_seen(page: Page, tmp_path: Path) -> None:
    """A voter who takes the greener image: those of the second run. Then a tie, and one that is undone."""
    folders, votes = two_runs(tmp_path), tmp_path / "votes.jsonl"
    with served(folders, votes) as url:
        page.goto(url)
        for done in range(3):
            expect(page.locator("#live")).to_have_text(f"{done} of 4")
            expect(page.locator("button.side").nth(1)).to_be_enabled()
            greens = shown_green(page)
            assert sorted(greens) == [0, 200]
            page.keyboard.press("ArrowLeft" if greens[0] == 200 else "ArrowRight")
        expect(page.locator("#live")).to_have_text("3 of 4")
        # Text of runs is text, and no run is named before the end.
        expect(page.locator(".prompt")).to_have_text(HOSTILE)
        assert page.locator("main script, main img[src=x]").count() == 0
        assert "training" not in page.content()
        expect(page.locator("button.side").nth(1)).to_be_enabled()
        page.keyboard.press("u")
        expect(page.locator("#live")).to_have_text("2 of 4")
        for done in (2, 3):
            expect(page.locator("#live")).to_have_text(f"{done} of 4")
            expect(page.locator("button.side").nth(1)).to_be_enabled()
            page.keyboard.press("ArrowDown")
        expect(page.locator("main")).to_contain_text("2 for B")
        expect(page.locator("main")).to_contain_text("after-training")
        expect(page.locator("main")).to_contain_text("B wins 75.0%")
        expect(page.locator("main")).to_contain_text(f"Saved in {votes}")
        page.goto("about:blank")
    assert [vote.preferred for vote in read_votes(votes).cast] == [1, 1, None, None]


def test_a_click_votes_and_a_phone_scrolls_down_alone(page: Page, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    with served(two_runs(tmp_path, size=512), tmp_path / "votes.jsonl") as url:
        page.goto(url)
        side = page.get_by_role("button", name="the left image")
        expect(side).to_be_enabled()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        side.click()
        expect(page.locator("#live")).to_have_text("1 of 4")
        page.get_by_role("button", name="no preference").click()
        expect(page.locator("#live")).to_have_text("2 of 4")
        page.get_by_role("button", name="undo").click()
        expect(page.locator("#live")).to_have_text("1 of 4")
        page.goto("about:blank")


def test_a_run_that_vanishes_is_said_on_the_page(browser_page: Page, tmp_path: Path) -> None:
    folders, votes = two_runs(tmp_path), tmp_path / "votes.jsonl"
    page = browser_page
    with served(folders, votes) as url:
        page.goto(url)
        expect(page.locator("button.side").nth(1)).to_be_enabled()
        shutil.rmtree(folders[1])
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("alert")).to_contain_text("Was the run moved or deleted? Votes so far are kept.")
        assert read_votes(votes).cast == ()
        page.goto("about:blank")


def test_a_page_of_an_ended_session_votes_on_nothing_and_continues_when_told(
    browser_page: Page, tmp_path: Path
) -> None:
    votes, page = tmp_path / "votes.jsonl", browser_page
    with served(two_runs(tmp_path), votes) as url:
        page.goto(url)
        expect(page.locator("button.side").nth(1)).to_be_enabled()
        # As if it had been loaded from a server that ended since.
        page.evaluate("() => { state.session = 'earlier'; }")
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("alert")).to_contain_text("Reload the page to continue.")
        assert read_votes(votes).cast == ()
        page.get_by_role("button", name="try again").click()
        expect(page.locator("button.side").nth(1)).to_be_enabled()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#live")).to_have_text("1 of 4")
        page.goto("about:blank")


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """A page that may print to the console: a browser notes there that an answer was an error."""
    result = browser.new_page()
    yield result
    result.close()
