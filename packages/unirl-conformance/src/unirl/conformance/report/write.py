"""The files of a report: data, page and matrix."""

from __future__ import annotations

from pathlib import Path

from unirl.core.disk import replace_text

from ..results import Report
from .file import to_json
from .matrix import matrix_md
from .page import page_html

__all__ = ["write_reports"]


def write_reports(report: Report, folder: Path) -> list[Path]:
    """Write `conformance.json`, `conformance.html` and `MATRIX.md`, replacing those that exist. Returns their paths."""
    files = {
        "conformance.json": to_json(report),
        "conformance.html": page_html(report),
        "MATRIX.md": matrix_md(report),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        replace_text(folder / name, text)
    return [folder / name for name in files]
