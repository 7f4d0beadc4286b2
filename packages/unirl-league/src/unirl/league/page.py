"""`league.json`, `LEAGUE.md` and `league.html`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from unirl.core.disk import replace_text
from unirl.core.strict_json import strict_json

from .budget import Budget
from .plots import draw
from .summary import Record, Row, curve, summarise

__all__ = ["COLUMNS", "cells", "write"]

COLUMNS = (
    "algorithm",
    "score",
    "std",
    "min to max",
    "start",
    "mean of curve",
    "runs",
    "steps",
    "samples",
    "forwards",
    "backwards",
    "CPU s",
    "peak MiB",
    "weights moved",
    "KL",
)
AXES = {"samples": "samples", "forwards": "forwards", "cpu_s": "CPU seconds", "steps": "steps", "kl": "KL to the start"}
NOTES = (
    "Score: the held-out metric where the budget is spent, mean over seeds; std: over seeds, sample. Mean of curve: "
    "mean score over the whole budget. Costs are those of training alone, at the last evaluation: forwards and "
    "backwards are rows (tokens, for text) through the trained module. Weights moved: distance to the initial weights, "
    "relative to their norm. KL: to the initial policy at the last evaluation, in nats, on held-out samples of the "
    "policy itself; of images, over the path of a Flow-SDE sampler, per latent element; of text, per token."
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b2230}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "td,th{padding:.25rem .6rem;border-bottom:1px solid #e3e7ee;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.faint{color:#5d6879}"
)


def write(
    folder: Path,
    *,
    head: Mapping[str, Any],
    records: Sequence[Record],
    refused: Mapping[str, str],
    budget: Budget,
    score: str,
    intervals: int,
) -> list[Row]:
    """Write the three files and return the rows of the table. head: what the league is, for people and machines."""
    rows = summarise(records, budget=budget, score=score)
    lines = {key: value if isinstance(value, str) else json.dumps(value) for key, value in head.items()}
    table = [cells(row) for row in rows]
    failures = {row.algorithm: row.errors for row in rows if row.errors}
    content = {**head, "table": [asdict(row) for row in rows], "refused": refused, "runs": list(records)}
    replace_text(folder / "league.json", strict_json(content, indent=1))

    text = ["# League", "", *(f"- {key}: {value}" for key, value in lines.items()), ""]
    text += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    text += ["| " + " | ".join(row) + " |" for row in table]
    text += ["", NOTES]
    for title, items in _lists(failures, refused).items():
        text += ["", f"## {title}", "", *(f"- `{name}`: {why}" for name, why in items)]
    replace_text(folder / "LEAGUE.md", "\n".join(text) + "\n")

    curves = {
        x: [
            one
            for row in rows
            if (one := curve(records, algorithm=row.algorithm, budget=budget, score=score, x=x, num=intervals))
        ]
        for x in AXES
    }
    html = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>League</title><style>{STYLE}</style><h1>League</h1>"
    ]
    html += ["<ul>", *(f"<li>{escape(key)}: {escape(value)}" for key, value in lines.items()), "</ul><table><tr>"]
    html += [f"<th>{escape(name)}" for name in COLUMNS]
    html += ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in table]
    html += [f"</table><p class=faint>{escape(NOTES)} Bands go from the lowest to the highest seed.</p>"]
    for x, label in AXES.items():
        html += [f"<h2>Held-out {escape(score)} against {label}</h2>", draw(curves[x], x_label=label, y_label=score)]
    for title, items in _lists(failures, refused).items():
        html += [
            f"<h2>{title}</h2><ul>",
            *(f"<li><b>{escape(name)}</b>: {escape(why)}" for name, why in items),
            "</ul>",
        ]
    replace_text(folder / "league.html", "\n".join(html) + "\n")
    return rows


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of `COLUMNS`."""
    if row.score is None or row.costs is None:
        return [row.algorithm, "failed", *[""] * 4, f"0/{row.num_runs}", *[""] * 8]
    costs = row.costs
    return [
        row.algorithm,
        f"{row.score:.4f}",
        "" if row.score_std is None else f"{row.score_std:.4f}",
        f"{row.score_min:.4f} to {row.score_max:.4f}",
        f"{row.start:.4f}",
        f"{row.mean_score:.4f}",
        f"{row.num_done}/{row.num_runs}",
        *(f"{costs[key]:,.0f}" for key in ("steps", "samples", "forwards", "backwards")),
        f"{costs['cpu_s']:.1f}",
        f"{row.peak_memory_mib:,.0f}",
        f"{row.distance:.2e}",
        "" if row.kl is None else f"{row.kl:.2e}",
    ]


def _lists(failures: Mapping[str, Sequence[str]], refused: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    failed = [(name, error) for name, errors in failures.items() for error in errors]
    result = {"Failed runs": failed, "Not in the league": list(refused.items())}
    return {title: items for title, items in result.items() if items}
