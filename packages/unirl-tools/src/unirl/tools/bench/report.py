"""The report of a benchmark, as Markdown and as a page; and the comparison of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from markdown_it import MarkdownIt
from unirl.loop.costs import Speed

from ..plan.prediction import shown_bytes
from .results import Results, Run, Subject

__all__ = ["Change", "compare", "comparison", "page", "report"]

RESAMPLES = 2000
HEAD = (
    '<meta name="viewport" content="width=device-width"><title>Benchmark</title>\n'
    "<style>body{font:15px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "th,td{border:1px solid #ccd;padding:.25rem .6rem;text-align:left}</style>"
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a workload differs between two benchmarks."""

    workload: str
    before: float
    """Median seconds of a step."""
    after: float
    low: float
    """The 95 % interval of after / before."""
    high: float

    @property
    def verdict(self) -> str:
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "no difference seen"


def report(results: Results) -> str:
    """Markdown: a table of workloads, the phases of each, and the machine."""
    lines = [
        "# Benchmark",
        "",
        "Seconds of a step: median over the runs of their medians; in brackets the smallest and the largest of these.",
        "",
        *_table(
            [
                "workload",
                "s/step",
                "samples/s",
                "peak memory",
                "planned",
                "log-prob mismatch",
                "bytes moved",
                "TFLOP/s",
            ],
            [_row(subject, results.of(subject.name)) for subject in results.subjects],
        ),
    ]
    for subject in results.subjects:
        runs = results.of(subject.name)
        words = " ".join([subject.recipe, *subject.overrides])
        lines += ["", f"## {subject.name}", "", f"`{words}`, {len(runs)} runs, {len(runs[0].steps)} steps each", ""]
        lines += _table(["phase", "s/step", "share"], _phases(runs))
        if subject.operations:
            rows = [[f"`{one['name']}`", f"{one['seconds']:.3f}", f"{one['share']:.1%}"] for one in subject.operations]
            lines += ["", "Operations of the profiled steps that took longest, without those they called:", ""]
            lines += _table(["operation", "seconds", "share"], rows)
    lines += ["", *_table(["machine", ""], [[key, value] for key, value in results.environment.items()])]
    return "\n".join(lines) + "\n"


def compare(before: Results, after: Results, *, seed: int = 0) -> list[Change]:
    """The change of each workload that both have.

    The interval is a bootstrap over runs, and over the steps of each: runs differ by more than their steps say.
    Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13 (percentile interval).
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    changes: list[Change] = []
    for subject in after.subjects:
        if not before.of(subject.name):
            continue
        first, second = (each.of(subject.name) for each in (before, after))
        ratios = _resampled(second, generator) / _resampled(first, generator)
        low, high = np.quantile(ratios, [0.025, 0.975])
        seconds = [median(run.seconds for run in runs) for runs in (first, second)]
        changes.append(
            Change(workload=subject.name, before=seconds[0], after=seconds[1], low=float(low), high=float(high))
        )
    return changes


def comparison(before: Results, after: Results, changes: Sequence[Change]) -> str:
    """Markdown: a table of the changes, and how recipes and machines differ."""
    rows = [
        [
            one.workload,
            f"{one.before:.3f}",
            f"{one.after:.3f}",
            f"{one.after / one.before:.3f} ({one.low:.3f} to {one.high:.3f})",
            one.verdict,
        ]
        for one in changes
    ]
    lines = _table(["workload", "before, s/step", "after, s/step", "ratio (95 % interval)", ""], rows) if rows else []
    notes: list[str] = []
    subjects = [{subject.name: subject for subject in each.subjects} for each in (before, after)]
    for name in dict.fromkeys([*subjects[0], *subjects[1]]):
        first, second = (each.get(name) for each in subjects)
        if first is None or second is None:
            notes.append(f"{name}: not compared, one of the two lacks it.")
        elif first.plan_hash != second.plan_hash:
            words = [" ".join([one.recipe, *one.overrides]) for one in (first, second)]
            notes.append(f"{name}: the recipes differ in what they compute: `{words[0]}` before, `{words[1]}` after.")
    for key in dict.fromkeys([*before.environment, *after.environment]):
        values = [each.environment.get(key, "absent") for each in (before, after)]
        if values[0] != values[1]:
            notes.append(f"{key}: {values[0]} before, {values[1]} after.")
    return "\n\n".join(filter(None, ["\n".join(lines), *notes])) + "\n"


def page(markdown: str) -> str:
    """One HTML file of a report, which loads nothing."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    return f'<!doctype html>\n<html lang="en"><meta charset="utf-8">{HEAD}\n{body}</html>\n'


def _row(subject: Subject, runs: Sequence[Run]) -> list[str]:
    seconds = [run.seconds for run in runs]
    steps = [step for run in runs for step in run.steps]
    peak = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    speed = Speed(flops=subject.flops, peak_tflops=subject.peak_tflops).metrics(
        {name: median(step.phases.get(name, 0.0) for step in steps) for name in subject.flops}
    )
    rates = [f"{name} {speed[f'perf/{name}_tflops']:.3g}" for name in subject.flops if f"perf/{name}_tflops" in speed]
    if "perf/train_mfu" in speed:
        rates.append(f"MFU {speed['perf/train_mfu']:.1%}")
    moved = [
        sum(v for k, v in step.metrics.items() if k.startswith("perf/") and k.endswith("_bytes")) for step in steps
    ]
    mismatch = [step.metrics["logp_mismatch_max"] for step in steps if "logp_mismatch_max" in step.metrics]
    return [
        subject.name,
        f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        f"{median(step.samples / step.seconds for step in steps):.1f}",
        shown_bytes(max(peak)) if peak else "-",
        "-" if subject.planned_bytes is None else shown_bytes(subject.planned_bytes),
        f"{max(mismatch):.2g}" if mismatch else "-",
        shown_bytes(round(mean(moved))),
        ", ".join(rates) or "-",
    ]


def _phases(runs: Sequence[Run]) -> list[list[str]]:
    steps = [step for run in runs for step in run.steps]
    names = dict.fromkeys(name for step in steps for name in step.phases)
    seconds = {name: mean(step.phases.get(name, 0.0) for step in steps) for name in names}
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return [[name, f"{value:.3f}", f"{value / total:.1%}"] for name, value in ordered if value / total >= 0.001]


def _resampled(runs: Sequence[Run], generator: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[RESAMPLES] medians of the seconds of a step, of runs and steps that were drawn with replacement."""
    seconds = [np.array([step.seconds for step in run.steps]) for run in runs]
    drawn = np.empty(RESAMPLES)
    for place in range(RESAMPLES):
        chosen = generator.integers(len(seconds), size=len(seconds))
        medians = [np.median(generator.choice(seconds[run], size=len(seconds[run]))) for run in chosen]
        drawn[place] = np.median(medians)
    return drawn


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = "| {} |".format
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [
        line(" | ".join(columns)),
        line(" | ".join("---" for _ in columns)),
        *(line(" | ".join(row)) for row in escaped),
    ]
