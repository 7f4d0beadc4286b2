"""Writing the report of a run folder: two PNG files and one page."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from unirl.core.disk import replace_bytes
from unirl.core.errors import RecipeError
from unirl.core.observe.recorded import Recorded
from unirl.core.specs.check import check_config

from .compare import pair_samples
from .config import ReportConfig
from .contact import contact_sheet
from .curves import draw_curves
from .families import held_out_families
from .history import RunHistory, read_history
from .page import render_page

__all__ = ["ReportFiles", "recorded_config", "write_report"]


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Files that were written."""

    page: Path
    curves: Path
    contact_sheet: Path | None
    """None when the run has no held-out images."""


def write_report(folder: Path, *, config: ReportConfig | None = None, is_running: bool = False) -> ReportFiles:
    """Write `report.html`, `curves.png` and `contact_sheet.png` of a run folder, over those that are there.

    config: None takes what the run's recipe says.  is_running: the run continues after this.
    Raises RunFolderError when the folder holds no run that can be read, RecipeError for settings that this report does
    not know, and DiskFull.
    """
    history = read_history(folder)
    config = config or recorded_config(history)
    light = draw_curves(history, dark=False)
    # Drawing takes most of the time of a report, and the run waits for it: the dark curves come with the last one.
    dark = light if is_running else draw_curves(history, dark=True)
    pairs = pair_samples(history, "images", limit=config.pairs)
    files = ReportFiles(
        page=folder / "report.html",
        curves=folder / "curves.png",
        contact_sheet=folder / "contact_sheet.png" if pairs else None,
    )
    if pairs and files.contact_sheet:
        replace_bytes(files.contact_sheet, contact_sheet(pairs, title=history.name))
    replace_bytes(files.curves, light.png)
    held_out = held_out_families(history, limit=config.pairs)
    page = render_page(
        history,
        config=config,
        light=light,
        dark=dark,
        pairs=None if held_out else pairs,
        text_pairs=None if held_out else pair_samples(history, "texts", limit=config.pairs),
        held_out=held_out,
        is_running=is_running,
    )
    # Half of a surrogate pair cannot be written.
    replace_bytes(files.page, page.encode("utf-8", "replace"))
    return files


def recorded_config(history: RunHistory) -> ReportConfig:
    """The settings of the report that the run was made with; the defaults when it had no report."""
    for name, section in history.settings("tracker").items():
        if isinstance(section, dict) and section.get("use") == "report":
            unknown = set(section) - {field.name for field in fields(ReportConfig)}
            if unknown:
                raise RecipeError(
                    f"{history.folder}: the recorded recipe has tracker keys that this report does not know: "
                    f"{', '.join(sorted(unknown))}. Use the unirl-tracker-report that made the run."
                )
            key = f"{history.folder}: tracker.{name}"
            read = Recorded(where=key, values=section)
            try:
                counts: dict[str, Any] = {name: read.count(name) for name in section if name != "use"}
            except ValueError as error:
                raise RecipeError(str(error)) from error
            result = ReportConfig(**counts)
            check_config(result, key=key)
            return result
    return ReportConfig()
