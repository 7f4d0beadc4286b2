"""The HTML page, as a parser sees it."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from unirl.conformance.report.page import page_html
from unirl.conformance.report.words import KIND_TITLES
from unirl.conformance.results import Report

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import (
    HOSTILE,
    TRACEBACK,
    claim_info,
    outcome,
    report_of,
    rich_report,
    small_report,
    subject_info,
)

VOID = {"meta", "br", "input", "link", "img", "wbr"}


class Page(HTMLParser):
    """Elements with their attributes, the text, and whether every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        if tag in ("td", "th"):
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def report() -> Report:
    return rich_report()


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(page_html(report))


def test_elements_are_closed_in_order(page: Page) -> None:
    assert page.open == []


def test_ids_are_unique_and_links_lead_somewhere(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    inside = [attributes["href"] for attributes in page.all("a") if attributes["href"].startswith("#")]
    assert len(inside) > 300
    assert {href[1:] for href in inside} <= set(ids)
    labels = [attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes]
    assert set(labels) <= set(ids)


def test_every_outcome_is_on_the_page_with_its_state(page: Page, report: Report) -> None:
    result = Counter(
        (attributes["data-claim"], attributes["data-state"])
        for _, attributes in page.elements
        if attributes.get("class") == "outcome"
    )
    assert result == Counter((one.claim, one.state) for one in report.outcomes)
    for one in report.outcomes:
        assert " ".join(one.reason.replace("`", "").split()) in page.text
    subjects = {(a["data-kind"], a["data-subject"]) for _, a in page.elements if "data-subject" in a}
    assert subjects == {(subject.kind, subject.id) for subject in report.subjects}


def test_what_has_no_outcome_is_counted(page: Page) -> None:
    assert "○ 3 no CUDA device is here" in page.text
    assert "65– n/a" in page.text


def test_numbers_stand_beside_their_bounds(page: Page) -> None:
    assert "largest difference 0.31 1e-06 over" in page.text
    assert "largest error against NumPy 1.24e-07 1e-06 12.4 %" in page.text
    assert "gradient norm 12.5 no bound" in page.text


def test_a_failure_has_its_traceback_its_meaning_and_where_to_look(page: Page) -> None:
    assert " ".join(TRACEBACK.split()) in page.text
    assert "What closes-twice gives to a user" in page.text
    assert "look for a scheduler in the engine that recomputes sigmas" in page.text
    assert "unirl conformance --claim closes-twice --engine sglang --model sd3" in page.text


def test_what_the_report_carries_is_text_and_no_markup(page: Page) -> None:
    assert len(page.all("script")) == 1
    assert " ".join(HOSTILE.replace("`", "").split()) in page.text


def test_only_the_own_script_may_run_and_nothing_is_loaded(report: Report, page: Page) -> None:
    html = page_html(report)
    result = re.search(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert result
    digest = base64.b64encode(hashlib.sha256(result.group(1).encode()).digest()).decode()
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not any("src" in attributes for _, attributes in page.elements)
    assert page.all("link") == [] and "@import" not in html and "url(" not in html


def test_a_link_of_another_scheme_is_text() -> None:
    subject = subject_info("model", model="sd3")
    gap = outcome("one", subject, "gap", "because", link="javascript:alert(1)")
    html = page_html(report_of([claim_info("one", "model")], [subject], [gap]))
    assert "javascript:alert(1)" in Page(html).text
    assert not any(attributes["href"].startswith("javascript") for attributes in Page(html).all("a"))


def test_names_that_look_alike_have_ids_of_their_own() -> None:
    subjects = [subject_info("model", model=name) for name in ("a b", "a/b", "a-b", "ünï")]
    claims = [claim_info("one", "model")]
    html = page_html(report_of(claims, subjects, [outcome("one", subject) for subject in subjects]))
    ids = [attributes["id"] for _, attributes in Page(html).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"model-a-b", "model-a-b-2", "model-a-b-3", "model-ünï"} <= set(ids)


def test_tables_say_what_their_heads_are_about(page: Page) -> None:
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))


def test_states_are_told_by_words(page: Page) -> None:
    for word in ("pass", "fail", "gap", "not run", "n/a"):
        assert word in page.text
    hidden = [a for tag, a in page.elements if tag == "b" and a.get("aria-hidden") == "true"]
    assert len(hidden) > 300, "symbols are there besides the words"


def test_filters_are_only_shown_where_scripts_run(page: Page) -> None:
    assert "hidden" in next(attributes for attributes in page.all("form"))


@pytest.mark.parametrize("states", [(), ("pass",), ("not run",), ("n/a",), ("gap", "fail")])
def test_any_report_makes_a_page(states: tuple[str, ...]) -> None:
    result = Page(page_html(small_report(*states)))  # pyright: ignore[reportArgumentType]
    assert result.open == []
    ids = {attributes["id"] for _, attributes in result.elements if "id" in attributes}
    assert {a["href"][1:] for a in result.all("a") if a["href"].startswith("#")} <= ids


def test_every_kind_has_a_title(page: Page) -> None:
    for kind in ("plugin", "model", "engine", "algorithm", "reward", "tracker", "cell"):
        assert KIND_TITLES[kind] in page.text
