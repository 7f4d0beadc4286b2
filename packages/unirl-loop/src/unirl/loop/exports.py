"""Adapters of a run, exported while it trains: in `exports` of the run folder, all of them kept."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from unirl.core.errors import RunFolderError, UniRLError
from unirl.core.observe.events import EventStream, read_events

from .parts import Parts
from .run_folder import EVENTS_FILE

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.roles import Policy
    from unirl.core.specs.plan import Plan

__all__ = ["EXPORTS", "Exports"]

EXPORTS = "exports"
LATEST, BEST = "latest", "best"
"""Links to exports."""


class Exports:
    """What `run.export_every` and `run.export_best` ask for.

    An export is written beside its place and renamed, so nobody reads half of one. One that fails is a finding: the
    run goes on, and its checkpoints can be exported later.
    """

    def __init__(self, run: Path, plan: Plan, *, start: int, catalog: Catalog) -> None:
        """run: its folder.  start: the step that it starts after."""
        self._run, self._plan, self._catalog = run, plan, catalog
        self._folder = run / EXPORTS
        self._best = _best_so_far(run / EVENTS_FILE, plan, until=start) if plan.run.export_best else None

    def after(self, step: int, scores: Mapping[str, float] | None, parts: Parts, events: EventStream) -> None:
        """Export the adapters of a step boundary if they are due.

        scores: metrics of the evaluation of this step; None without one.
        """
        every, score = self._plan.run.export_every, _score(scores or {}, self._plan)
        is_best = self._plan.run.export_best and score is not None and (self._best is None or score > self._best)
        if not is_best and not (every and step % every == 0):
            return
        began = time.perf_counter()
        try:
            folder = self._write(step, parts)
            for link in [LATEST, *([BEST] if is_best else [])]:
                _link(self._folder / link, folder.name)
        except (UniRLError, OSError) as error:
            key = "run.export_every" if every else "run.export_best"
            events.finding(f"{key}: step {step} was not exported: {error}", step=step)
            return
        if is_best:
            self._best = score
        events.emit("exported", step=step, folder=folder.name, best=is_best, seconds=time.perf_counter() - began)

    def _write(self, step: int, parts: Parts) -> Path:
        policy = cast("Policy", self._plan.eval.policy)
        updates = {name: backend.export_weights(policy=policy, kind="lora") for name, backend in parts.backends.items()}
        final = self._folder / f"step-{step:06d}"
        part, old = (final.with_name(f".{prefix}-{final.name}") for prefix in ("part", "old"))
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            self._catalog.write_adapters(self._plan, updates, run=self._run, folder=part, step=step)
            if final.exists():
                # Of a step that a resumed run takes again.
                final.rename(old)
            part.rename(final)
        finally:
            for rest in (part, old):
                shutil.rmtree(rest, ignore_errors=True)
        return final


def _score(metrics: Mapping[str, float], plan: Plan) -> float | None:
    """The mean held-out score of the last stage that has one, finite."""
    names = [f"{plan.prefix(stage)}score_mean" for stage in reversed(plan.stages)]
    return next((metrics[name] for name in names if math.isfinite(metrics.get(name, math.nan))), None)


def _best_so_far(file: Path, plan: Plan, *, until: int) -> float | None:
    """The highest score of the evaluations up to this step, the first one left out: it is that of the base model.
    Raises RunFolderError for a line that is not an event."""
    if not file.is_file():
        return None
    try:
        events = read_events(file)
    except ValueError as error:
        raise RunFolderError(f"{error} Remove the line, or leave out run.export_best.") from error
    evaluated = [event for event in events if event.kind == "evaluated" and 0 < event.step <= until]
    scores = [_score(event.data.get("metrics", {}), plan) for event in evaluated]
    return max((score for score in scores if score is not None), default=None)


def _link(link: Path, target: str) -> None:
    """Point a link at a folder beside it, at once."""
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
