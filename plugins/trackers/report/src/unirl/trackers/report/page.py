"""The page: everything about a run in one HTML file that loads nothing."""

from __future__ import annotations

import base64
import io
import math
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from PIL import Image

from .compare import Pairs, held_out_changes
from .config import ReportConfig
from .curves import PANELS, Curves
from .families import HeldOut, families
from .fold import fold
from .graph import stage_graph
from .history import RunHistory, recipe_values
from .media import MediaKind, Sample, SampleBatch, open_picture
from .theme import style_variables

__all__ = ["bytes_text", "duration", "number", "render_page", "spread"]

T = TypeVar("T")

THUMBNAIL = 320
"""Longest edge of an embedded image, in pixels; larger ones are scaled down to it."""
MAX_TABLE_ROWS = 400
"""Steps of the table of all numbers; a longer run shows that many, evenly spread."""


def render_page(
    history: RunHistory,
    *,
    config: ReportConfig,
    light: Curves,
    dark: Curves,
    pairs: Pairs | None,
    text_pairs: Pairs | None,
    held_out: HeldOut | None,
    is_running: bool,
) -> str:
    """The HTML of a run. `light` and `dark` are the same curves for both colour schemes."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": number,
        "duration": duration,
        "bytes": bytes_text,
        "picture": _picture,
        "input": lambda file: _image_uri(file, most=THUMBNAIL),
        "fold": fold,
    }
    template = environment.from_string(
        resources.files("unirl.trackers.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    began = datetime.fromtimestamp(history.sessions[0].began, UTC)
    return template.render(
        history=history,
        status=_status(history, is_running=is_running),
        began=began.strftime("%Y-%m-%d %H:%M UTC"),
        changes=held_out_changes(history),
        panels=[
            (title, _data_uri(bright, "png"), _data_uri(dim, "png"))
            for (title, _), bright, dim in zip(PANELS, light.panels, dark.panels, strict=True)
        ],
        pairs=pairs,
        text_pairs=text_pairs,
        graph=stage_graph(history),
        held_out=held_out,
        families=spread(sorted(families(history, "train").items()), config.gallery_steps),
        gallery=_gallery(history, "images", config),
        text_gallery=_gallery(history, "texts", config),
        components=_components(history),
        costs=_costs(history),
        phases=_phases(history),
        table=_table(history),
        recipe=_recipe(history),
        has_origins=bool(history.origins),
        versions={**history.versions, **_versions_here()},
        row_tiles=config.gallery_samples,
        num_branches=config.gallery_samples,
        colors=style_variables(),
    )


def number(value: object) -> str:
    """A number as people read it: 4 significant digits, thousands apart, exponents only where they help."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 1e3 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`7 ms`, `12.3 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def bytes_text(size: float) -> str:
    """`812 B`, `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _status(history: RunHistory, *, is_running: bool) -> tuple[str, str]:
    """The word and what it means."""
    status = history.sessions[-1].status
    if status is None and is_running:
        return "running", "it goes on; this page is rewritten at every evaluation"
    if status is None:
        return "unfinished", "no end was recorded: it still runs, or it was cut off"
    meanings = {
        "done": "every step was completed",
        "stopped": f"it can go on: unirl train --resume {history.folder}",
        "failed": "see the findings",
    }
    return status, meanings.get(status, "")


def _components(history: RunHistory) -> list[tuple[str, list[float | None]]]:
    """Reward components: name -> training at the start and the end, held-out at the start and the end."""
    window = max(1, min(10, len(history.steps) // 2))
    keys = dict.fromkeys(key for row in history.steps for key in row.metrics if _is_reward(key))
    keys |= dict.fromkeys(key for item in history.evaluations for key in item.metrics if _is_reward(key))
    first, last = history.steps[:window], history.steps[-window:]
    rows: list[tuple[str, list[float | None]]] = []
    for key in keys:
        held_out = [item.metrics.get(key) for item in history.evaluations]
        training = [_mean(row.metrics[key] for row in rows if key in row.metrics) for rows in (first, last)]
        rows.append((key, [*training, *([held_out[0], held_out[-1]] if held_out else [None, None])]))
    return rows


def _costs(history: RunHistory) -> dict[str, Any]:
    """Predicted counts, and the shares of generation and training, predicted and measured."""
    # Generation beside training is not a phase of the step; it has its own number.
    seconds = {
        phase: sum(row.metrics.get(f"{phase}_s", row.phases.get(phase, 0.0)) for row in history.steps)
        for phase in ("generate", "train")
    }
    work = sum(seconds.values())
    generate = _mean(track["generate_share"] for track in history.predicted.values() if "generate_share" in track)
    shares: list[tuple[str, float | None, float | None]] = []
    if work > 0 or generate is not None:
        for phase in ("generate", "train"):
            predicted = None if generate is None else (generate if phase == "generate" else 1 - generate)
            shares.append((phase, predicted, seconds[phase] / work if work > 0 else None))
    counts = [
        (track, key.replace("_", " "), number(value) + (f" ({bytes_text(value)})" if key.endswith("bytes") else ""))
        for track, items in history.predicted.items()
        for key, value in items.items()
        if key != "generate_share"
    ]
    names = dict.fromkeys(key for row in history.steps for key in row.metrics if key.startswith("perf/"))
    rates = [
        (name, bytes_text(mean) if name.endswith("_bytes") else number(mean))
        for name in names
        if (mean := _mean(row.metrics[name] for row in history.steps if name in row.metrics)) is not None
    ]
    return {"shares": shares, "counts": counts, "rates": rates}


def _phases(history: RunHistory) -> list[dict[str, Any]]:
    """Seconds of each phase, slowest first; evaluations are apart from the steps."""
    totals: dict[str, list[float]] = {}
    for row in (*history.steps, *history.evaluations):
        for phase, seconds in row.phases.items():
            totals.setdefault(phase, []).append(seconds)
    whole = sum(sum(times) for times in totals.values())
    return [
        {
            "name": phase,
            "times": len(times),
            "mean": sum(times) / len(times),
            "longest": max(times),
            "total": sum(times),
            "share": sum(times) / whole if whole else 0.0,
        }
        for phase, times in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]


def _gallery(history: RunHistory, kind: MediaKind, config: ReportConfig) -> list[tuple[SampleBatch, Sequence[Sample]]]:
    """Training samples of some steps, evenly spread, first and last among them; none of a run with several stages."""
    if families(history, "train"):
        return []
    batches = spread(history.batches(kind, "train"), config.gallery_steps)
    return [(batch, batch.samples[: config.gallery_samples]) for batch in batches]


def _table(history: RunHistory) -> dict[str, Any]:
    """Every number of every step, or of evenly spread steps of a long run."""
    rows = spread(history.steps, MAX_TABLE_ROWS)
    names = list(dict.fromkeys(key for row in rows for key in row.metrics))
    phases = list(dict.fromkeys(key for row in rows for key in row.phases))
    return {"rows": rows, "names": names, "phases": phases, "num_all": len(history.steps)}


def _recipe(history: RunHistory) -> list[tuple[str, str, str, str]]:
    """Key path, value, source and detail of every value of the resolved recipe."""
    return [(key, value, *history.origins.get(key, ("", ""))) for key, value in recipe_values(history.resolved).items()]


def _versions_here() -> dict[str, str]:
    names = ("unirl-tracker-report", "matplotlib", "pillow")
    return {"python (of this page)": platform.python_version()} | {f"{n} (of this page)": version(n) for n in names}


def _picture(sample: Sample) -> dict[str, Any]:
    """An image for the page: its data URI, and whether it is so small that its pixels should stay sharp; of a video the
    URIs of its animation and of the strip of its frames."""
    if sample.animation is not None:
        strip = _image_uri(sample.file, most=2 * THUMBNAIL)
        return {"uri": _data_uri(sample.animation.read_bytes(), "webp"), "is_small": False, "strip": strip}
    is_small = max(open_picture(sample.file).size) <= THUMBNAIL // 2
    return {"uri": _image_uri(sample.file, most=THUMBNAIL), "is_small": is_small, "strip": None}


def _image_uri(file: Path, *, most: int) -> str:
    """The data URI of an image, scaled down to `most` pixels on its longest edge."""
    picture = open_picture(file)
    if max(picture.size) <= most:
        return _data_uri(file.read_bytes(), "png")
    image = picture.convert("RGB")
    image.thumbnail((most, most), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=88)
    return _data_uri(content.getvalue(), "jpeg")


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def spread(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` items, evenly spread, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _mean(values: Iterable[float]) -> float | None:
    result = list(values)
    return sum(result) / len(result) if result else None


def _is_reward(key: str) -> bool:
    return key.startswith("reward/") or "/reward/" in key
