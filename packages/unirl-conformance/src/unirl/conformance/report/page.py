"""The page: everything about a run in one HTML file that loads nothing and reads well without scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Hashable
from datetime import UTC, datetime
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ..results import Outcome, Report, SubjectInfo
from ..verdicts import Number
from .view import TRACKS, View, nearest_number, subject_counts
from .words import (
    KIND_TITLES,
    MEANINGS,
    ORDER,
    SYMBOLS,
    against_bound,
    count_of,
    duration,
    number,
    share_of_bound,
)

__all__ = ["page_html"]


def page_html(report: Report) -> str:
    """The whole file. Anything in the report is text in it, never markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = _template("page.js")
    view = View(report)
    return environment.from_string(_template("page.html.jinja")).render(
        report=report,
        view=view,
        total=view.total,
        created=_moment(report.created),
        order=ORDER,
        symbols=SYMBOLS,
        meanings=MEANINGS,
        kind_titles=KIND_TITLES,
        style=Markup(_template("page.css")),
        script=Markup(script),
        # The browser then runs this script and no other, whatever the report carries.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        at=_Anchors(),
        number=number,
        duration=duration,
        against_bound=against_bound,
        share=_share,
        prose=_prose,
        count_of=count_of,
        is_web=_is_web,
        tracks=TRACKS,
        nearest_number=nearest_number,
        subject_counts=subject_counts,
    )


def _template(name: str) -> str:
    return files("unirl.conformance.report").joinpath("templates", name).read_text(encoding="utf-8")


class _Anchors:
    """Ids of elements: readable, the same for the same report, and never twice."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str] = {}
        self._used: set[str] = set()

    def __call__(self, *names: str) -> str:
        if names not in self._known:
            plain = "-".join(re.sub(r"[^\w.+@-]+", "-", name) for name in names)
            result, again = plain, 1
            while result in self._used:
                again += 1
                result = f"{plain}-{again}"
            self._used.add(result)
            self._known[names] = result
        return self._known[names]

    def claim(self, name: str) -> str:
        return self("claim", name)

    def subject(self, subject: SubjectInfo) -> str:
        return self(subject.kind, subject.id)

    def outcome(self, outcome: Outcome) -> str:
        return self(outcome.kind, outcome.subject, outcome.claim)

    def failure(self, outcome: Outcome) -> str:
        return self("failure", outcome.kind, outcome.subject, outcome.claim)


def _prose(text: str) -> Markup:
    """A sentence in which `code` is set as code."""
    parts = re.split(r"`([^`\n]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def _is_web(link: str) -> bool:
    """Whether it may be a link: a scheme such as `javascript:` may not."""
    return link.startswith(("https://", "http://"))


def _share(one: Number) -> str:
    """`12 %` of the bound, or `over`."""
    share = share_of_bound(one)
    return "" if share is None else "over" if share > 1 else f"{number(100 * share)} %"


def _moment(created: str) -> str:
    return datetime.fromisoformat(created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
