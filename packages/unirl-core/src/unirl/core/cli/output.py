"""Output of all commands: JSON for programs, rich text for people, errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..strict_json import strict_json

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "print_error", "print_json", "print_table"]


def console(*, stderr: bool = False) -> Console:
    """A console that writes plain text to pipes and files: no colour, no truncated lines."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    if file.isatty():
        return Console(file=file, highlight=False)
    # Rich assumes 80 columns without a terminal and would truncate long cells.
    return Console(file=file, highlight=False, width=200, color_system=None)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(strict_json(data, indent=2, ensure_ascii=False) + "\n")


def print_error(error: BaseException) -> None:
    """The message of an error and its notes on stderr, without a traceback."""
    notes: list[str] = getattr(error, "__notes__", [])
    sys.stderr.write("\n".join([f"error: {error}", *notes]) + "\n")


def print_table(rows: Iterable[Mapping[str, Any]], *, columns: Sequence[str]) -> None:
    """Print rows as a borderless table with column headings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
    console().print(table)
