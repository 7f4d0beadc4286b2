"""The reports of a run as files: data, page, matrix and badges."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..results import Report, to_json
from .matrix import matrix_md
from .page import page_html
from .view import Tally, View

__all__ = ["badge", "write_reports"]


def write_reports(report: Report, folder: Path) -> list[Path]:
    """Write `conformance.json`, `conformance.html`, `MATRIX.md` and `badges/<dist>.json`, over those that are there.

    A dist that nothing was tried on keeps the badge that it has. Returns what was written.
    """
    view = View(report)
    files = {
        "conformance.json": to_json(report),
        "conformance.html": page_html(report),
        "MATRIX.md": matrix_md(report),
    }
    for dist in view.dists:
        tally = Tally.of(o for row in view.rows if dist in row.subject.dists for o in row.outcomes)
        # The name comes from metadata that anybody may have written.
        name = re.sub(r"[^\w.-]|^\.+", "-", dist)
        files[f"badges/{name}.json"] = json.dumps(badge(tally), ensure_ascii=False) + "\n"
    return [_replace(folder / name, text) for name, text in files.items()]


def badge(tally: Tally) -> Mapping[str, object]:
    """What shields.io shows at its endpoint (https://shields.io/badges/endpoint-badge).

    Green only where all that was tried ran and holds; a gap takes the bright out of it.
    """
    reply = [f"{tally[state]} {state}" for state in ("fail", "pass", "gap", "not run") if tally[state]]
    if tally["fail"]:
        color = "red"
    elif not tally["pass"] and not tally["gap"]:
        color = "lightgrey"
    elif tally["not run"]:
        color = "blue"
    else:
        color = "yellowgreen" if tally["gap"] else "brightgreen"
    return {"schemaVersion": 1, "label": "conformance", "message": ", ".join(reply) or "n/a", "color": color}


def _replace(path: Path, text: str) -> Path:
    """Write a file so that whoever reads it meanwhile sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    return part.replace(path)
