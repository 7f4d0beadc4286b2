"""The report on a terminal: grids and numbers first, then every failure, gaps, and claims that were not run."""

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
from .grid import grid_lines
from .view import Grid, Tally, View, subject_counts
from .words import ORDER, SYMBOLS, against_bound, count_of, duration, number, share_of_bound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["print_report"]

STYLES: dict[State, str] = {"pass": "green", "fail": "bold red", "gap": "yellow", "not run": "magenta", "n/a": "dim"}
MAX_REASONS = 6
"""Reasons of n/a that are shown, where nothing else is."""
MAX_NUMBERS = 8
"""Claims whose number is shown."""
MAX_SUBJECTS = 12
"""Subjects of a kind that have a line each, and those that are named for one reason."""


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
    devices = report.devices if len(report.devices) > 1 else ("",)
    for device in devices:
        out.print(_last_line(View(report.on(device)) if device else view, device))


def _blocks(view: View, *, width: int) -> Iterator[RenderableType]:
    for device in view.report.devices:
        for grid in View(view.report.on(device)).grids:
            yield _grid(grid, device, width=width)
    if view.nearest:
        yield _number_table(view)
    if view.rows:
        yield _subject_table(view)
    for outcomes in view.by_reason("fail").values():
        yield _failure(view, *outcomes)
    if view.total["gap"]:
        yield _list("Declared gaps", "gap", (_gap(one) for one in view.with_state("gap")))
    if view.total["not run"]:
        yield _list("Not run", "not run", _not_run(view))
    if not view.rows and not view.total["not run"]:
        counts = list(view.untried("n/a").items())
        texts = [(reason, count_of(count, "claim")) for reason, count in counts[:MAX_REASONS]]
        if rest := len(counts) - len(texts):
            texts.append((f"and {count_of(rest, 'further reason')}", ""))
        yield _list("Not applicable", "n/a", texts)


def _grid(grid: Grid, device: str, *, width: int) -> Text:
    text = Text(f"{grid.title} on {device}: state, largest log-prob mismatch\n", style="bold")
    for line in grid_lines(grid, width=width):
        for piece, state in line:
            text.append(piece, style="not bold " + STYLES[state] if state else "not bold")
        text.append("\n")
    text.rstrip()
    return text


def _subject_table(view: View) -> Table:
    """A line for each subject, or one for all of a kind where there are many; packaging last."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("subject", overflow="fold")
    for state in ORDER[:-1]:
        table.add_column(state, justify="right", no_wrap=True)
    for kind in view.kinds:
        rows = view.of_kind(kind)
        lines = [(row.subject.id, row.tally) for row in rows]
        if len(rows) > MAX_SUBJECTS:
            lines = [(f"{len(rows)} subjects", Tally.of(one for row in rows for one in row.outcomes))]
        for name, tally in lines:
            mark = Text(tally.symbol, style=STYLES[tally.state])
            table.add_row(mark, kind, Text(name), *(_count(tally[state], state) for state in ORDER[:-1]))
    return table


def _count(count: int, state: State) -> Text:
    return Text(str(count), style=STYLES[state]) if count else Text("·", style="dim")


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


def _failure(view: View, outcome: Outcome, *others: Outcome) -> Text:
    """A failure in full, and the subjects of others with the same error."""
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
    if others:
        text.append("\n  the same error ", style="dim").append(f"in {count_of(len(others), 'more claim')}: ")
        text.append(_subjects(others))
    if outcome.detail:
        text.append("\n\n").append("\n".join(f"    {line}".rstrip() for line in outcome.detail.rstrip().splitlines()))
    return text


def _gap(one: Outcome) -> tuple[str, str]:
    return f"{one.claim} on {one.kind} {one.subject}: {one.reason}", one.link


def _not_run(view: View) -> Iterator[tuple[str, str]]:
    """Reasons, and what was not run for each."""
    for reason, outcomes in view.not_run.items():
        yield reason, _subjects(outcomes)
    for reason, count in view.untried("not run").items():
        yield reason, count_of(count, "claim")


def _subjects(outcomes: Iterable[Outcome]) -> str:
    """The subjects of these outcomes, each with how many are its own."""
    counts = subject_counts(outcomes)
    named = [f"{kind} {name} ({count_of(count, 'claim')})" for (kind, name), count in counts.items()]
    rest = f", and {len(named) - MAX_SUBJECTS} more" if len(named) > MAX_SUBJECTS else ""
    return f"{', '.join(named[:MAX_SUBJECTS])}{rest}"


def _list(title: str, state: State, texts: Iterable[tuple[str, str]]) -> Group:
    """Texts, each with a detail on a separate line, that wrap beside their marks."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for text, detail in texts:
        line = Text(text).append(f"\n{detail}" if detail else "", style="dim")
        table.add_row(Text(SYMBOLS[state], style=STYLES[state]), line)
    return Group(Text(title, style="bold"), table)


def _last_line(view: View, device: str) -> Text:
    text = Text(f"{device}: " if device else "")
    text.append(f"{view.headline} ", style=STYLES["fail"] if view.total["fail"] else "bold")
    for state in ORDER:
        count = view.total[state]
        text.append(", " if state != ORDER[0] else "")
        text.append(f"{count} {state}", style=STYLES[state] if count else "dim")
    return text.append(f" in {duration(view.report.seconds)}")


def _print(out: Console, block: RenderableType) -> None:
    # A traceback keeps its own lines, however narrow the terminal.
    out.print(block, soft_wrap=isinstance(block, Text))
