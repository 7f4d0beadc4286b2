"""Chromium, for the pages that `unirl view` and `unirl vote` serve."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("not run: no Chromium on this machine (chromium, chromium-browser or google-chrome in PATH)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        # Its sandbox needs user namespaces, which containers often lack; the pages are ours.
        result = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose messages on the console, errors and requests elsewhere fail the test."""
    problems: list[str] = []
    result = browser.new_page(viewport={"width": 1280, "height": 900})
    result.set_default_timeout(WAIT_MS)
    result.on("console", lambda message: problems.append(message.text))
    result.on("pageerror", lambda error: problems.append(str(error)))
    result.on("dialog", lambda dialog: problems.append(dialog.message))
    result.on("request", lambda request: None if is_local(request.url) else problems.append(request.url))
    yield result
    result.close()
    assert problems == []


def is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:///"))
