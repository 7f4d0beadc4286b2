"""The curves of a run: nine panels in one figure, which the page shows one by one."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from .history import RunHistory
from .theme import DARK, LIGHT, Theme

__all__ = ["PANELS", "Curves", "draw_curves"]

COLUMNS, ROWS = 3, 3
PANEL_INCHES = (5.2, 3.6)
HEAD_INCHES = 0.55
DOTS_PER_INCH = 130
VISIBLE_SHARE = 0.005
"""Phases that take less of the time are drawn together, as `other`."""
FEW_CURVES = 4
"""Curves whose legend finds room beside them."""
LARGEST = 1e100
"""Values that curves show: larger ones, on either side of 0, are left out as those that are not finite are."""
LONGEST = 80
"""Characters of a name in a picture."""
_HELD_OUT = {"score_mean": "mean score", "share_at_threshold": "share at the threshold"}
"""Metrics of evaluations that are drawn -> their labels."""
RUNNING_MEAN_FROM = 40
"""Steps from which a running mean is drawn over a noisy curve."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """PNG files in memory."""

    png: bytes
    """All panels."""
    panels: tuple[bytes, ...]
    """Each panel alone, in the order of `PANELS`."""


def draw_curves(history: RunHistory, *, dark: bool) -> Curves:
    """Draw every panel. A panel whose numbers the run does not report says so."""
    theme = DARK if dark else LIGHT
    # No pyplot: it would set a backend and keep figures for the whole process, which belongs to the run.
    inches = (PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * ROWS + HEAD_INCHES)
    figure = Figure(figsize=inches, dpi=DOTS_PER_INCH, facecolor=theme.ground)
    canvas = FigureCanvasAgg(figure)
    below_head = 1 - HEAD_INCHES / inches[1]
    left, top = 0.13 / COLUMNS, 1 - 0.22 / inches[1]
    heading = f"{_plain(history.name)}: {history.num_steps} steps, plan {_plain(history.plan_hash)}"
    figure.text(left, top, heading, color=theme.faint, fontsize=14, va="top")
    for index, (title, draw) in enumerate(PANELS):
        column, row = index % COLUMNS, index // COLUMNS
        corner = ((column + 0.14) / COLUMNS, (ROWS - 1 - row + 0.155) / ROWS * below_head)
        axes = figure.add_axes((*corner, 0.81 / COLUMNS, 0.69 / ROWS * below_head))
        _style(axes, title, theme)
        if draw(axes, history, theme):
            _show_resumes(axes, history, theme)
            if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
                _show_legend(axes, theme, loc="best")
        else:
            axes.set_yticks([])
            axes.set_xticks([])
            axes.text(0.5, 0.5, "not reported yet", ha="center", va="center", color=theme.faint, fontsize=12)
    canvas.draw()
    whole = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    head = round(HEAD_INCHES * DOTS_PER_INCH)
    width, height = whole.width // COLUMNS, (whole.height - head) // ROWS
    boxes = [
        (column * width, head + row * height, (column + 1) * width, head + (row + 1) * height)
        for row in range(ROWS)
        for column in range(COLUMNS)
    ]
    return Curves(png=_png(whole), panels=tuple(_png(whole.crop(box)) for box in boxes))


def _reward(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    spreads = history.series("reward_std")
    series = history.series("reward_mean")
    for index, (name, points) in enumerate(series.items()):
        steps, values = _columns(points)
        color = theme.series[index % len(theme.series)]
        of_spread = _columns(spreads.get(name.removesuffix("mean") + "std", []))
        spread = dict(zip(*of_spread, strict=True))
        if spread:
            widths = np.array([spread.get(int(step), math.nan) for step in steps])
            label = "" if index else "± std of the samples"
            axes.fill_between(steps, values - widths, values + widths, color=color, alpha=0.15, lw=0, label=label)
        stage = name.removesuffix("reward_mean").rstrip("/")
        # With mean credit a parent's curve is that of its child.
        style = "-" if index % 2 == 0 else "--"
        _noisy_line(axes, steps, values, color=color, label=_label(stage, "mean of a step"), style=style)
    axes.set_ylabel("reward", color=theme.faint, fontsize=11)
    return bool(series)


def _held_out(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    result: dict[str, list[tuple[int, float]]] = {}
    for evaluation in history.evaluations:
        for key, value in evaluation.metrics.items():
            if key.rpartition("/")[2] in _HELD_OUT and not _is_component(key):
                result.setdefault(key, []).append((evaluation.step, value))
    for index, (name, points) in enumerate(result.items()):
        steps, values = _columns(points)
        color = theme.series[(2, 0, 3, 1)[index % 4]]
        stage, _, metric = name.rpartition("/")
        label = _label(stage, _HELD_OUT[metric])
        axes.plot(steps, values, color=color, lw=2.2, marker="o", ms=6, label=label)
        for at in sorted({0, len(points) - 1}):
            axes.annotate(
                f"{values[at]:.3g}",
                (float(steps[at]), float(values[at])),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color=color,
                fontsize=10.5,
                fontweight="bold",
            )
    axes.margins(y=0.18)
    axes.set_ylabel("score, share", color=theme.faint, fontsize=11)
    return bool(result)


def _components(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    names = sorted({key for row in history.steps for key in row.metrics if _is_component(key)})
    for index, name in enumerate(names):
        points = [(row.step, row.metrics[name]) for row in history.steps if name in row.metrics]
        steps, values = _columns(points)
        stage, _, part = name.rpartition("reward/")
        part = f"credit of {part}" if any(one["name"] == part for one in history.stages) else part
        label = _label(stage.rstrip("/"), part) if len(names) <= len(theme.series) else ""
        _noisy_line(axes, steps, values, color=theme.series[index % len(theme.series)], label=label)
    axes.set_ylabel("mean of a step", color=theme.faint, fontsize=11)
    if FEW_CURVES < len(names) <= len(theme.series):
        # Room for a long legend above the curves.
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + 0.55 * (top - bottom))
        _show_legend(axes, theme, loc="upper center", ncols=2)
    return bool(names)


def _clip_fraction(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    series = history.series("clip_fraction")
    for index, (name, points) in enumerate(series.items()):
        steps, values = _columns(points)
        color = theme.series[(1 + index) % len(theme.series)]
        _noisy_line(axes, steps, values, color=color, label=name.removesuffix("clip_fraction").rstrip("/"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of clipped terms", color=theme.faint, fontsize=11)
    return bool(series)


def _log_prob_gap(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    series = [
        (_label(name.removesuffix(metric).rstrip("/"), text), points)
        for metric, text in (("logp_mismatch_max", "largest"), ("logp_mismatch_mean", "mean"))
        for name, points in history.series(metric).items()
    ]
    section = history.settings("algorithm")
    clips = [section, *section.values()] if history.stages else [section]
    ranges = [clip.get("clip_range") for clip in clips if isinstance(clip, Mapping)]
    positive = [value for _, points in series for _, value in points if 1 / LARGEST <= value <= LARGEST]
    bounded = sorted({float(clip) for clip in ranges if isinstance(clip, (int, float)) and 1e-12 <= clip <= 1e12})
    if not series:
        return False
    # A log axis has no 0, and an exact 0 is what a run in one process should show: below the decade it is linear.
    floor = 10.0 ** (math.floor(math.log10(min(positive))) - 1) if positive else 1e-9
    top = max([*positive, *bounded, 10 * floor])
    axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
    axes.set_ylim(-floor * 0.4, top * 4)
    for index, (label, points) in enumerate(series):
        steps, values = _columns(points)
        style = "-" if index % 2 == 0 else "--"
        axes.plot(steps, values, color=theme.series[(4 + index) % len(theme.series)], lw=1.8, ls=style, label=label)
    for clip in bounded:
        axes.axhline(clip, color=theme.faint, lw=1.3, ls=":", label=f"clip range {clip:g}")
    if not positive:
        axes.text(
            0.5, 0.32, "exactly 0 at every step", transform=axes.transAxes, ha="center", color=theme.ink, fontsize=12
        )
    axes.set_ylabel("|log-prob mismatch| (nats)", color=theme.faint, fontsize=11)
    return True


def _loss(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    series = {name.removesuffix("loss").rstrip("/"): points for name, points in history.series("loss").items()}
    axes.set_ylabel("mean of the updates", color=theme.faint, fontsize=11)
    _short_ticks(axes)
    return _noisy_lines(axes, series, theme)


def _gradient_norm(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    """One curve for each model that trains: stages of one model share its steps, and so their gradient."""
    learners = {stage["name"]: stage["learner"] for stage in history.stages}
    series: dict[str, list[tuple[int, float]]] = {}
    for name, points in history.series("grad_norm").items():
        stage = name.removesuffix("grad_norm").rstrip("/")
        series.setdefault(str(learners.get(stage, stage)) if stage else "", points)
    result = _noisy_lines(axes, series, theme)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_ylabel("before clipping", color=theme.faint, fontsize=11)
    _short_ticks(axes)
    return result


def _kl(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    series = {
        _label(name.removesuffix(metric).rstrip("/"), text): points
        for metric, text in (("approx_kl", "from the rollout policy"), ("kl", "from the reference policy"))
        for name, points in history.series(metric).items()
        if not _is_component(name)
    }
    axes.set_ylabel("nats, estimated", color=theme.faint, fontsize=11)
    _short_ticks(axes)
    return _noisy_lines(axes, series, theme)


def _phases(axes: Axes, history: RunHistory, theme: Theme) -> bool:
    totals: dict[str, float] = {}
    for row in history.steps:
        for phase, seconds in row.phases.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    whole = sum(totals.values())
    order = sorted((p for p in totals if totals[p] >= VISIBLE_SHARE * whole), key=lambda phase: -totals[phase])
    order = order[: len(theme.series) - 1]
    if whole == 0:
        return False
    steps = np.array([row.step for row in history.steps], dtype=float)
    # Half a step of the same height on both sides, so that even one step has an area.
    at = np.concatenate(([steps[0] - 0.5], steps, [steps[-1] + 0.5]))
    heights = [(phase, [row.phases.get(phase, 0.0) for row in history.steps]) for phase in order]
    if len(order) < len(totals):
        rest = [sum(s for phase, s in row.phases.items() if phase not in order) for row in history.steps]
        heights.append(("other", rest))
    ground = np.zeros(len(at))
    for index, (phase, values) in enumerate(heights):
        top = ground + np.array([values[0], *values, values[-1]])
        axes.fill_between(at, ground, top, step="mid", color=theme.series[index], alpha=0.85, lw=0, label=phase)
        ground = top
    # Room for the legend above the areas.
    axes.set_ylim(0, float(ground.max()) * 1.35)
    _show_legend(axes, theme, loc="upper center", ncols=3)
    axes.set_ylabel("seconds a step", color=theme.faint, fontsize=11)
    return True


Panel = Callable[[Axes, RunHistory, Theme], bool]
"""Draws a panel; False when the run has nothing for it."""
PANELS: tuple[tuple[str, Panel], ...] = (
    ("Training reward", _reward),
    ("Held-out prompts", _held_out),
    ("Reward components", _components),
    ("Clip fraction", _clip_fraction),
    ("Gradient norm", _gradient_norm),
    ("Loss", _loss),
    ("KL divergence", _kl),
    ("Engine log-prob mismatch", _log_prob_gap),
    ("Time of each phase", _phases),
)


def _style(axes: Axes, title: str, theme: Theme) -> None:
    axes.set_title(title, loc="left", color=theme.ink, fontsize=15, fontweight="bold", y=1.04)
    axes.set_facecolor(theme.ground)
    axes.grid(visible=True, color=theme.grid, lw=0.9)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=theme.faint, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(colors=theme.faint, labelsize=10.5, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _show_legend(axes: Axes, theme: Theme, *, loc: Literal["best", "upper center"], ncols: int = 1) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles,
        list(map(_plain, labels)),
        loc=loc,
        ncols=ncols,
        fontsize=10.5,
        framealpha=0.75,
        facecolor=theme.ground,
        edgecolor=theme.grid,
        labelcolor=theme.ink,
    )


def _show_resumes(axes: Axes, history: RunHistory, theme: Theme) -> None:
    for number, session in enumerate(history.sessions[1:]):
        label = "resumed" if number == 0 else ""
        axes.axvline(session.first_step + 0.5, color=theme.faint, lw=1.1, ls=(0, (2, 3)), label=label)


def _noisy_line(axes: Axes, steps: np.ndarray, values: np.ndarray, *, color: str, label: str, style: str = "-") -> None:
    """The curve itself; of a long one, faintly, with its running mean over it."""
    if len(steps) < RUNNING_MEAN_FROM:
        marker = "o" if len(steps) < 12 else ""
        axes.plot(steps, values, color=color, lw=2, ls=style, marker=marker, ms=5, label=label)
        return
    window = max(5, len(steps) // 20)
    axes.plot(steps, values, color=color, lw=1, alpha=0.35)
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    running = (sums[ends] - sums[starts]) / (ends - starts)
    axes.plot(steps, running, color=color, lw=2.2, ls=style, label=f"{label}, running over {window}" if label else "")


def _noisy_lines(axes: Axes, series: Mapping[str, Sequence[tuple[int, float]]], theme: Theme) -> bool:
    """The curves of `series` under its keys; False when there is none."""
    for index, (label, points) in enumerate(series.items()):
        steps, values = _columns(points)
        _noisy_line(axes, steps, values, color=theme.series[index % len(theme.series)], label=label)
    return bool(series)


def _short_ticks(axes: Axes) -> None:
    """Small numbers with a power of ten above the axis: their labels would take the room of the axis' own."""
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
    # Left of the axis: above it is the title.
    axes.yaxis.get_offset_text().set_horizontalalignment("right")


def _columns(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([value for _, value in points], dtype=float)
    return np.array([step for step, _ in points]), np.where(np.abs(values) <= LARGEST, values, math.nan)


def _label(stage: str, text: str) -> str:
    """Name of a curve: the stage, if there are several, then what it shows."""
    return f"{stage}: {text}" if stage else text


def _plain(text: str) -> str:
    """A name as matplotlib shows it letter by letter: without formulas, in one line, and short."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return (line if len(line) <= LONGEST else f"{line[:LONGEST]}…").replace("$", r"\$")


def _is_component(key: str) -> bool:
    return key.startswith("reward/") or "/reward/" in key


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG", optimize=False)
    return content.getvalue()
