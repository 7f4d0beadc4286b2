"""Progress of a run: a live bar on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unirl.core.types.event import Event

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RunSummary", "event_line", "show_progress"]

NUMBERS = (
    ("reward", "reward_mean", "{:.4f}"),
    ("logp_mismatch", "logp_mismatch_max", "{:.1e}"),
    ("mean logp_mismatch", "logp_mismatch_mean", "{:.1e}"),
    ("clipped", "clip_fraction", "{:.1%}"),
    ("loss", "loss", "{:.3g}"),
    ("kl", "kl", "{:.2e}"),
    ("grad norm", "grad_norm", "{:.2e}"),
    ("lr", "lr", "{:.1e}"),
)
"""Numbers shown for each step: label, metric (of any track), format."""


class RunSummary:
    """Last metrics and time per phase of a run, collected from its events."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        """Metrics of the last step."""
        self.evaluated: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.first_evaluated: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        """Phase -> seconds, over all steps."""
        self.work: dict[str, float] = {"generate": 0.0, "train": 0.0}
        """Seconds of these phases on any thread: rollouts generated during training report their own times."""
        self.predicted_share: float | None = None
        """Predicted share of generation in the total cost of forward passes."""

    def __call__(self, event: Event) -> None:
        if event.kind in ("run_started", "run_resumed"):
            shares = [track["generate_share"] for track in event.data["predicted"].values()]
            self.predicted_share = sum(shares) / len(shares) if shares else None
        elif event.kind == "step":
            self.metrics = dict(event.data["metrics"])
            for phase, seconds in event.data["phases"].items():
                self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            phases: Mapping[str, float] = event.data["phases"]
            for phase in self.work:
                self.work[phase] += self.metrics.get(f"{phase}_s", phases.get(phase, 0.0))
        elif event.kind == "evaluated":
            self.evaluated = dict(event.data["metrics"])
            self.first_evaluated = self.first_evaluated or self.evaluated

    def lines(self) -> list[str]:
        """Lines to print when a run ends."""
        lines: list[str] = []
        for key, value in self.evaluated.items():
            before = self.first_evaluated.get(key, value)
            lines.append(f"held out  {key} {before:.4f} -> {value:.4f}")
        total = sum(self.seconds.values())
        if total > 0:
            slow = [(phase, s) for phase, s in _slowest_first(self.seconds) if s >= 0.005 * total]
            parts = ", ".join(f"{phase} {100 * s / total:.0f} %" for phase, s in slow)
            lines.append(f"time      {total:.1f} s in steps: {parts}")
            work = sum(self.work.values())
            if self.predicted_share is not None and work > 0:
                measured = self.work["generate"] / work
                lines.append(
                    f"cost      generation is {measured:.0%} of generation and training; "
                    f"{self.predicted_share:.0%} was predicted from the number of forwards"
                )
        return lines


@contextmanager
def show_progress() -> Generator[Callable[[Event], None]]:
    """A listener for the events of one run; the display is closed when the block ends, however it ends."""
    if not sys.stdout.isatty():
        yield _PlainProgress()
        return
    from rich.live import Live

    display = _LiveProgress()
    with Live(display.shown, refresh_per_second=4) as live:
        display.above = live.console
        yield display


def event_line(event: Event, *, steps: int) -> str | None:
    """One line for an event that is worth showing; None otherwise."""
    data = event.data
    if event.kind == "loading":
        return f"loading {data['text']}"
    if event.kind == "run_started":
        return f"{data['recipe']}  {steps} steps  plan {data['plan_hash']}"
    if event.kind == "run_resumed":
        return f"{data['recipe']}  resumed after step {event.step} of {steps}  plan {data['plan_hash']}"
    if event.kind == "step":
        return f"step {event.step}/{steps}  {_numbers(data)}"
    if event.kind == "evaluated":
        numbers = "  ".join(f"{key} {value:.4f}" for key, value in data["metrics"].items())
        return f"held out after step {event.step}  {numbers}"
    if event.kind == "finding":
        return f"note: {data['text']}"
    if event.kind == "checkpoint_saved":
        return f"saved {data['folder']}"
    if event.kind == "exported":
        return f"exported {data['folder']}{', the best so far' if data['best'] else ''}"
    return None


class _PlainProgress:
    """One line per event, flushed at once: logs of a job are read while it runs."""

    def __init__(self) -> None:
        self._steps = 0
        self._began = (0, 0.0)
        """Step and time at which this process started."""

    def __call__(self, event: Event) -> None:
        self._steps = event.data.get("steps", self._steps)
        if event.kind in ("run_started", "run_resumed"):
            self._began = (event.step, event.time)
        line = event_line(event, steps=self._steps)
        if line is not None and event.kind == "step" and event.step > self._began[0]:
            line += self._left(event)
        if line is not None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _left(self, event: Event) -> str:
        """Estimated time left, from the mean time per step so far, evaluations included."""
        first, began = self._began
        seconds = (event.time - began) / (event.step - first) * (self._steps - event.step)
        minutes, hours = divmod(round(seconds), 60)[0], round(seconds) // 3600
        if not seconds > 0:
            return ""
        return (
            f"  {hours} h {minutes % 60:02} min left" if hours else f"  {minutes} min {round(seconds) % 60:02} s left"
        )


class _LiveProgress:
    """A bar with the numbers of the last step below it; evaluations and findings scroll by above."""

    def __init__(self) -> None:
        from rich.console import Group
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
        self._task = self._bar.add_task("loading", total=None, count="")
        self._numbers = Text()
        self._steps = 0
        self.shown = Group(self._bar, self._numbers)
        self.above: Console | None = None
        """Console for lines that scroll by above the bar."""

    def __call__(self, event: Event) -> None:
        if event.kind in ("run_started", "run_resumed"):
            self._steps = event.data["steps"]
            # The time left is estimated from steps only, so the clock starts with the first one.
            count = f"{event.step}/{self._steps}"
            self._bar.reset(self._task, total=self._steps, completed=event.step, description="training", count=count)
        if event.kind == "step":
            self._bar.update(self._task, completed=event.step, count=f"{event.step}/{self._steps}")
            self._numbers.plain = _numbers(event.data)
            return
        line = event_line(event, steps=self._steps)
        if line is not None and self.above is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            self.above.print(f"{clock}  {line}", markup=False, highlight=False, soft_wrap=True)


def _numbers(data: Mapping[str, Any]) -> str:
    metrics: Mapping[str, float] = data["metrics"]
    shown: list[str] = []
    for label, metric, form in NUMBERS:
        for key, value in metrics.items():
            # A reward may have a component of the same name.
            if (key == metric or key.endswith(f"/{metric}")) and not key.startswith("reward/"):
                track = key.removesuffix(metric)
                shown.append(f"{track}{label} {form.format(value)}")
    phases: Mapping[str, float] = data["phases"]
    total = sum(phases.values())
    if "samples" in data and total > 0:
        shown.append(f"{data['samples'] / total:.2f} samples/s")
    slow = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in _slowest_first(phases) if seconds >= 0.05)
    shown.append(f"{total:.1f} s" + (f" ({slow})" if slow else ""))
    if metrics.get("steps_skipped"):
        shown.append("skipped: every sample got one reward")
    return "  ".join(shown)


def _slowest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
