"""Grids as lines of monospaced text, for terminals and for code blocks in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..verdicts import State
from .view import Cell, Grid
from .words import short_number

__all__ = ["Line", "grid_lines"]

Line = Sequence[tuple[str, "State | None"]]
"""Pieces of a line, each with the state that colours it."""
LABEL = 16
"""Longest line of a row's label; longer ones are broken at dashes, like heads."""
HEAD = 8
"""The same of a column's head."""


def grid_lines(grid: Grid, *, width: int) -> Iterator[Line]:
    """The grid in blocks of as many columns as fit side by side; each begins with the names of its models."""
    texts = [[_text(cell) for cell in cells] for rows in grid.groups.values() for cells in rows.values()]
    heads = [_broken(name, HEAD) for name in grid.models]
    widths = [max(map(len, [*head, *(row[place] for row in texts)])) for place, head in enumerate(heads)]
    labels = [line for rows in grid.groups.values() for name in rows for line in _broken(name, LABEL)]
    label = max(map(len, [*labels, *grid.groups]))
    start = 0
    while start < len(widths):
        end, used = start + 1, label + 1 + widths[start]
        while end < len(widths) and used + 1 + widths[end] <= width:
            used += 1 + widths[end]
            end += 1
        if start:
            yield []
        yield from _block(grid, heads, widths, label, range(start, end))
        start = end


def _block(
    grid: Grid, heads: Sequence[Sequence[str]], widths: Sequence[int], label: int, places: Sequence[int]
) -> Iterator[Line]:
    height = max(len(heads[place]) for place in places)
    for line in range(height):
        # The last line of each head is above its column.
        parts = [["", *heads[place]][max(0, line - height + len(heads[place]) + 1)] for place in places]
        yield _joined(" " * label, [(part, None) for part in parts], [widths[place] for place in places])
    for title, rows in grid.groups.items():
        if title:
            yield [(title, None)]
        for name, cells in rows.items():
            first, *rest = _broken(name, LABEL)
            pieces: Line = [(_text(cells[place]), _state(cells[place])) for place in places]
            yield _joined(first.ljust(label), pieces, [widths[place] for place in places])
            yield from ([(text, None)] for text in rest)


def _joined(label: str, pieces: Line, widths: Iterable[int]) -> Line:
    line: list[tuple[str, State | None]] = [(label, None)]
    for (text, state), width in zip(pieces, widths, strict=True):
        line.extend(((" ", None), (text, state), (" " * (width - len(text)), None)))
    while line and not line[-1][0].strip():
        line.pop()
    return line


def _broken(name: str, length: int) -> list[str]:
    """A name in lines of at most this length, broken before dashes: `hunyuan`, `-video`, `-i2v`."""
    lines: list[str] = []
    for place, word in enumerate(name.split("-")):
        part = f"-{word}" if place else word
        if lines and len(lines[-1]) + len(part) <= length:
            lines[-1] += part
        else:
            lines.append(part)
    return lines


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell.tally.symbol + ("" if cell.mismatch is None else short_number(cell.mismatch.value))


def _state(cell: Cell | None) -> State | None:
    return None if cell is None else cell.tally.state
