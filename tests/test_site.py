"""The documentation site: `docs/build.py` makes it, its links lead somewhere, it needs no network, and has every page twice."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from pages import ROOT

BUILD_TIMEOUT_S = 840
"""On a machine that runs other tests as well; an idle one needs a minute."""
REPOSITORY = "https://example.org/unirl"
SOURCE = f"{REPOSITORY}/blob/c0ffee"
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Elements that load a file when a page is opened, and the attribute that names it."""

pytestmark = [
    # The reference is written from all parts, then 140 pages become HTML.
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(BUILD_TIMEOUT_S + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None,
        reason="not run: no Sphinx; `python3 bootstrap.py --dev` installs the dependency group `docs`",
    ),
]


class Html(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADED.get(tag) in values:
            self.loaded.append(values[LOADED[tag]])


@functools.cache
def html(path: Path) -> Html:
    return Html(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of `.readthedocs.yaml`, in this environment in place of one that it sets up."""
    settings = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    (command,) = settings["build"]["jobs"]["build"]["html"]
    output = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["bash", "-euc", command.partition(" -- ")[2]],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "READTHEDOCS_OUTPUT": str(output),
            "READTHEDOCS_GIT_CLONE_URL": f"{REPOSITORY}.git",
            "READTHEDOCS_GIT_COMMIT_HASH": "c0ffee",
        },
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output / "html"


def broken(path: Path, url: str) -> bool:
    """Whether a link of a file of the site leads nowhere."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return True
    return bool(parts.fragment) and target.suffix == ".html" and unquote(parts.fragment) not in html(target).anchors


def markdown_links(text: str) -> Iterator[str]:
    for match in re.finditer(r"^(`{3,}).*?^\1|`[^`\n]*`(?!\])|\]\(([^)\s]*)\)", text, flags=re.DOTALL | re.MULTILINE):
        if match[2]:
            yield match[2]


def test_links_and_anchors_of_every_page_lead_somewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    wrong = [
        f"{page.relative_to(site)}: {url}"
        for page in pages
        for url in [*html(page).links, *html(page).loaded]
        if broken(page, url)
    ]
    assert not wrong


def test_links_to_files_of_the_repository_lead_to_files(site: Path) -> None:
    links = {url for page in site.rglob("*.html") for url in html(page).links if url.startswith(f"{SOURCE}/")}
    assert links
    assert not [url for url in links if not (ROOT / urlsplit(url.removeprefix(f"{SOURCE}/")).path).exists()]


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not [url for url in html(page).loaded if urlsplit(url).netloc], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_every_page_is_published_as_markdown_with_links_that_work(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "search.html"]
    for page in pages:
        text = page.with_suffix(".md").read_text(encoding="utf-8")
        assert not [url for url in markdown_links(text) if broken(page, url)], page
        assert "{toctree}" not in text
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^<!-- (\S+\.md) -->$", full, re.MULTILINE)
    assert sorted(listed) == sorted(page.with_suffix(".md").relative_to(site).as_posix() for page in pages)


def test_llms_txt_has_a_title_a_summary_and_described_links(site: Path) -> None:
    title, _, summary, *rest = (site / "llms.txt").read_text(encoding="utf-8").split("\n")
    assert title == "# UniRL" and summary.startswith("> RL post-training")
    links = [re.fullmatch(r"- \[[^\]]+\]\((\S+)\): \S.*", line) for line in rest if line.startswith("- ")]
    assert len(links) > 50 and all(links), [line for line in rest if line.startswith("- ")]
    assert not [link[1] for link in links if link and not (site / link[1]).is_file()]


def test_the_search_index_has_the_words_of_the_pages(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert "tutorials/quickstart" in index and "plugins/rewards/rules" in index
