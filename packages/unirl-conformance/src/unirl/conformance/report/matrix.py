"""MATRIX.md: the results on four screens, for terminals and code hosts; a function only of the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..results import Report
from ..verdicts import State
from .grid import grid_lines
from .view import Tally, View
from .words import KIND_TITLES, MEANINGS, ORDER, PARTLY, SYMBOLS, count_of, number

__all__ = ["matrix_md"]

WIDTH = 120
"""Columns of the grids."""
MAX_NUMBERS = 8
"""Claims whose number is listed."""
DEVICES = {"cpu": "On the CPU", "cuda": "On a GPU"}


def matrix_md(report: Report) -> str:
    """The whole file, with a newline at its end."""
    return "\n".join(_lines(report)).rstrip("\n") + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield "# Conformance matrix\n"
    for device in report.devices:
        yield f"- {_summary(View(report.on(device)), DEVICES.get(device, device))}"
    yield ""
    for state in ORDER:
        yield f"- {SYMBOLS[state]} {state}: {MEANINGS[state]}"
    yield f"- {PARTLY} partly run: holds where it was tested, and the rest was not run\n"
    yield (
        "A cell has all claims about its model with that engine, or with that algorithm on any engine and backend. "
        "Its number is the mismatch between log-probs of rollout and replay, the one nearest to its bound. Every "
        "outcome is on the page: `unirl conformance --from conformance/conformance.json --report DIR`.\n"
    )
    for device in report.devices:
        view = View(report.on(device))
        if view.rows:
            yield f"## {DEVICES.get(device, device)}\n"
            yield from _grids(view)
            yield from _kinds(view)
            yield from _numbers(view)
            yield from _open(view)
    yield from _environment(report)


def _summary(view: View, title: str) -> str:
    if not view.rows and view.total["not run"]:
        reasons = "; ".join(view.untried("not run"))
        return (
            f"**{title}.** Nothing was tested: {_md(reasons)}. {SYMBOLS['not run']} {view.total['not run']:,} not run."
        )
    counts = ", ".join(f"{SYMBOLS[state]} {view.total[state]:,} {state}" for state in ORDER)
    return f"**{title}.** {_md(view.headline)} {counts}."


def _grids(view: View) -> Iterator[str]:
    for grid in view.grids:
        yield f"### {_md(grid.title)}\n\n```text"
        yield from ("".join(piece for piece, _ in line) for line in grid_lines(grid, width=WIDTH))
        yield "```\n"


def _kinds(view: View) -> Iterator[str]:
    yield "### Every kind\n"
    lines: list[list[str]] = []
    for kind in view.kinds:
        rows = view.of_kind(kind)
        tally = Tally.of(one for row in rows for one in row.outcomes)
        counts = (f"{tally[state]:,}" if tally[state] else "" for state in ORDER[:-1])
        lines.append([KIND_TITLES[kind].lower(), f"{len(rows):,}", *counts])
    head = ("claims about", "subjects", *(f"{SYMBOLS[state]} {state}" for state in ORDER[:-1]))
    yield from _table(head, lines, right=range(1, 6))


def _numbers(view: View) -> Iterator[str]:
    if not view.nearest:
        return
    count = sum(row.num_numbers for row in view.numbers)
    yield f"### Nearest to their bounds, of {count_of(count, 'number')}\n"
    yield from _table(
        ("value", "at most", "number", "claim", "subject"),
        (
            [
                number(row.worst.value),
                number(row.worst.bound or 0.0),
                _md(row.worst.name),
                _md(row.claim),
                _md(row.where.subject),
            ]
            for row in view.nearest[:MAX_NUMBERS]
        ),
        right=(0, 1),
    )


def _open(view: View) -> Iterator[str]:
    """Failures and gaps with their reasons; reasons of claims that were not run, counted."""
    titles: tuple[tuple[State, str], ...] = (("fail", "Failures"), ("gap", "Gaps"))
    for state, title in titles:
        outcomes = view.with_state(state)
        if outcomes:
            yield f"### {title}\n"
        for one in outcomes:
            link = f" (<{_url(one.link)}>)" if one.link else ""
            yield f"- {SYMBOLS[state]} {_md(one.claim)} on {one.kind} **{_md(one.subject)}**: {_md(one.reason)}{link}"
        if outcomes:
            yield ""
    counts = {reason: len(outcomes) for reason, outcomes in view.not_run.items()}
    counts |= view.untried("not run")
    if counts:
        yield "### Not run\n"
    for text, count in counts.items():
        yield f"- {SYMBOLS['not run']} {count_of(count, 'claim')}: {_md(text)}"
    yield ""


def _environment(report: Report) -> Iterator[str]:
    here = report.environment
    yield "## Environment\n"
    mode = "batch-invariant" if here.batch_invariant else "not batch-invariant"
    versions = {
        "run": f"tier {report.tier}, {report.created[:10]}, numerics {mode}",
        "machine": f"{here.platform}, Python {here.python}, {', '.join(here.devices) or 'no GPU'}, {here.cpu}",
        "packages": ", ".join(f"{name} {version}" for name, version in sorted(here.packages.items())),
        **{f"engine {name}": text for name, text in sorted(here.engines.items())},
    }
    yield from _table(("", ""), ([_md(name), _md(text)] for name, text in versions.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """A Markdown table whose columns are aligned as text, too."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    for index, line in enumerate(lines):
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield f"| {' | '.join(cells)} |"
        if index == 0:
            rules = ["-" * (width + 1) + ":" if p in right else "-" * (width + 2) for p, width in enumerate(widths)]
            yield f"|{'|'.join(rules)}|"
    yield ""


def _md(text: str) -> str:
    """Text as it is, whatever it contains, on one line; only `code` stays code."""
    parts = re.split(r"(`[^`\n]+`)", " ".join(text.split()))
    return "".join(
        part.replace("|", "\\|") if place % 2 else re.sub(r"([\\*_|\[\]`~])", r"\\\1", _html(part))
        for place, part in enumerate(parts)
    )


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _url(link: str) -> str:
    """The link, escaped so that it can be written between angle brackets."""
    return re.sub(r"[\s<>]", lambda found: f"%{ord(found.group()):02X}", link)
