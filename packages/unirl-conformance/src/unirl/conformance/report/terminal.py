"""The report on a terminal: the matrix, every failure in full, then gaps and claims not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from unirl.core.cli.output import console

from ..results import Outcome, Report
from ..verdicts import State
from .view import TRACKS, Cell, CellTable, Reason, SubjectRow, View
from .words import ORDER, SYMBOLS, against_bound, count_of, duration, number, share_of_bound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["print_report"]

STYLES: dict[State, str] = {"pass": "green", "fail": "bold red", "gap": "yellow", "not run": "magenta", "n/a": "dim"}
MAX_REASONS = 6
"""Of what is n/a, where nothing else is there to show, the most frequent reasons are named."""
MAX_NUMBERS = 8
"""Of the claims that measure, those that are shown."""
MAX_SUBJECTS = 12
"""Subjects that are named for one reason of not having run."""


def print_report(report: Report, *, left_out: str = "") -> None:
    """Show a report to a person, on a terminal or in a pipe. left_out: a sentence on what was not covered."""
    view, out = View(report), console()
    for block in _blocks(view, width=out.width):
        out.print()
        _print(out, block)
    if left_out:
        out.print()
        out.print(Text(left_out, style="dim"))
    out.print()
    out.print(_last_line(view))


def _blocks(view: View, *, width: int) -> Iterator[RenderableType]:
    plain = [row for kind in view.kinds if kind != "cell" for row in view.of_kind(kind)]
    if plain:
        yield _subject_table(plain)
    for table in view.cells:
        if table.is_tried:
            yield from _cell_tables(table, width=width)
    if view.nearest:
        yield _number_table(view)
    for outcome in view.with_state("fail"):
        yield _failure(view, outcome)
    if view.with_state("gap"):
        yield _heading("gap", "Declared gaps")
        yield _gaps(view.with_state("gap"))
    if view.with_state("not run"):
        yield _heading("not run", "Not run")
        yield _not_run(view.reasons("not run"))
    if not any(row.tally.tried for row in view.rows) and view.rows:
        yield _heading("n/a", "Not applicable")
        yield _not_applicable(view.reasons("n/a"))
    elif view.not_applicable:
        yield Text(f"n/a: {view.not_applicable}", style="dim")
    if view.untried:
        yield Text(f"No claim of this run is about these: {view.untried}.", style="dim")


def _subject_table(rows: Iterable[SubjectRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("subject", overflow="fold")
    for state in ORDER:
        table.add_column(state, justify="right", no_wrap=True)
    for row in rows:
        state = row.tally.state
        table.add_row(
            Text(SYMBOLS[state], style=STYLES[state]),
            row.subject.kind,
            Text(row.subject.id),
            *(_count(row.tally[each], each) for each in ORDER),
        )
    return table


def _count(count: int, state: State) -> Text:
    return Text(str(count), style=STYLES[state]) if count else Text("·", style="dim")


def _cell_tables(table: CellTable, *, width: int) -> Iterator[Group]:
    """The matrix, in as many tables side by side as the width allows to stand below each other."""
    head = max(len(row.model) for row in table.rows) + max(len(row.engine) for row in table.rows) + 4
    shown = [[_cell_text(cell, bound=table.bound) for cell in row.cells] for row in table.rows]
    widths = [max(len(name), *(len(row[i]) for row in shown)) for i, name in enumerate(table.algorithms)]
    title = f"{TRACKS[table.track]}: model x engine x algorithm on backend {table.backend}, {table.device}"
    if table.gaps:
        title += ": state and log-prob gap" + ("" if table.bound is None else f", at most {number(table.bound)}")
    start = 0
    while start < len(widths):
        end, used = start + 1, head + widths[start]
        while end < len(widths) and used + 2 + widths[end] <= width:
            used += 2 + widths[end]
            end += 1
        part = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        part.add_column("model", no_wrap=True)
        part.add_column("engine", no_wrap=True)
        for name in table.algorithms[start:end]:
            part.add_column(name, overflow="fold")
        for row, texts in zip(table.rows, shown, strict=True):
            part.add_row(Text(row.model), Text(row.engine), *texts[start:end])
        yield Group(Text(title, style="bold"), part)
        start = end


def _cell_text(cell: Cell | None, *, bound: float | None) -> Text:
    """bound: the one that the title states."""
    if cell is None:
        return Text("")
    tally = cell.row.tally
    words = [SYMBOLS[tally.state]]
    if cell.gap is None or tally.state != "pass":
        words.append(str(tally))
    if cell.gap is not None:
        words.append(against_bound(cell.gap) if bound is None else number(cell.gap.value))
    return Text(" ".join(words), style=STYLES[tally.state])


def _number_table(view: View) -> Group:
    count = sum(row.num_numbers for row in view.numbers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    title = f"nearest to their bounds, of {count_of(count, 'number')} that were measured"
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    for name in ("number", "claim", "subject"):
        table.add_column(name, overflow="fold")
    for row in view.nearest[:MAX_NUMBERS]:
        is_over = (share_of_bound(row.worst) or 0.0) > 1
        table.add_row(
            Text(number(row.worst.value), style=STYLES["fail"] if is_over else ""),
            Text(number(row.worst.bound or 0.0)),
            Text(row.worst.name),
            Text(row.claim),
            Text(row.where.subject),
        )
    return Group(Text(title, style="bold"), table)


def _failure(view: View, outcome: Outcome) -> Text:
    claim = view.claim(outcome)
    text = Text()
    text.append(f"{SYMBOLS['fail']} FAIL  {outcome.claim}", style=STYLES["fail"])
    text.append(f"  on {outcome.kind} ").append(outcome.subject, style="bold")
    text.append(f"\n  {outcome.reason}\n", style="bold")
    for one in outcome.numbers:
        text.append(f"  {one.name}: {against_bound(one)}\n")
    if claim.meaning:
        text.append("  what it means  ", style="dim").append(f"{claim.meaning}\n")
    if claim.if_it_fails:
        text.append("  where to look  ", style="dim").append(f"{claim.if_it_fails}\n")
    text.append("  try it again   ", style="dim").append(view.again(outcome))
    if outcome.detail:
        text.append("\n\n").append("\n".join(f"    {line}".rstrip() for line in outcome.detail.rstrip().splitlines()))
    return text


def _gaps(outcomes: Iterable[Outcome]) -> Table:
    table = _list()
    for one in outcomes:
        text = Text(f"{one.claim} on {one.kind} {one.subject}: ").append(one.reason)
        table.add_row(Text(SYMBOLS["gap"], style=STYLES["gap"]), text.append(f"  {one.link}" if one.link else ""))
    return table


def _not_run(reasons: Iterable[Reason]) -> Table:
    table = _list()
    for reason in reasons:
        named = [f"{kind} {name} ({count_of(count, 'claim')})" for (kind, name), count in reason.subjects.items()]
        rest = f", and {len(named) - MAX_SUBJECTS} more" if len(named) > MAX_SUBJECTS else ""
        text = Text(reason.text).append(f"\n{', '.join(named[:MAX_SUBJECTS])}{rest}", style="dim")
        table.add_row(Text(SYMBOLS["not run"], style=STYLES["not run"]), text)
    return table


def _not_applicable(reasons: tuple[Reason, ...]) -> Table:
    table = _list()
    for reason in reasons[:MAX_REASONS]:
        table.add_row(Text(str(len(reason.outcomes)), style="dim"), Text(reason.text, style="dim"))
    rest = reasons[MAX_REASONS:]
    if rest:
        count = sum(len(reason.outcomes) for reason in rest)
        text = f"for {count_of(len(rest), 'further reason')}"
        table.add_row(Text(str(count), style="dim"), Text(text, style="dim"))
    return table


def _list() -> Table:
    """Marks with texts that wrap beside them."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _heading(state: State, title: str) -> Text:
    return Text(f"{title} ({SYMBOLS[state]})", style="bold")


def _last_line(view: View) -> Text:
    text = Text(f"{view.headline} ", style=STYLES["fail"] if view.report.count("fail") else "bold")
    for state in ORDER:
        count = view.report.count(state)
        text.append(", " if state != ORDER[0] else "")
        text.append(f"{count} {state}", style=STYLES[state] if count else "dim")
    return text.append(f" in {duration(view.report.seconds)}")


def _print(out: Console, block: RenderableType) -> None:
    # A traceback keeps its own lines, however narrow the terminal.
    out.print(block, soft_wrap=isinstance(block, Text))
