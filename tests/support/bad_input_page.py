"""The tables of docs/explanation/bad-input.md: tests take their inputs and the expected answers from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["answer", "rows"]

PAGE = Path(__file__).parents[2] / "docs/explanation/bad-input.md"


@cache
def rows(section: str) -> tuple[tuple[str, ...], ...]:
    """The cells of the table under a heading, row by row, without backticks. A line break in a cell is written `⏎`."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert len(lines) > 2, f"{PAGE} has no table under {section!r}"
    return tuple(tuple(_plain(cell) for cell in line.strip("|").split(" | ")) for line in lines[2:])


def answer(event: str) -> str:
    """The answer to an event of the section `Runs and checkpoints`."""
    (result,) = [row[1] for row in rows("Runs and checkpoints") if row[0] == event]
    return result


def _plain(cell: str) -> str:
    cell = cell.strip()
    is_code = cell.startswith("`") and cell.endswith("`") and cell.count("`") == 2
    return (cell[1:-1] if is_code else cell).replace("⏎", "\n")
