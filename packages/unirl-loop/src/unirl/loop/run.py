"""Running a plan in its folder: build the parts, run the loop, and leave the run resumable whatever happens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unirl.core.data.run_data import RunData, read_data
from unirl.core.errors import PlanRejected, UniRLError
from unirl.core.match.match import match
from unirl.core.match.named_code import FLAG, named_code
from unirl.core.observe.events import EventStream, read_events
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import RunInfo
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.numerics.batch_invariant import batch_invariant

from .algorithm_state import resume_algorithm
from .announce import announce, loading, predicted_costs
from .build import build_part, built_parts
from .checkpoints import Checkpoints
from .costs import Speed, peak_tflops_of
from .exports import Exports
from .parts import Parts
from .restarts import with_restarts
from .resume import checkpoint_to_resume
from .run_folder import CHECKPOINTS, EVENTS_FILE, RunFolder, run_folder, write_recipe, write_traceback
from .run_plan import with_batch_invariance, with_run_folder
from .saved_samples import remove_samples
from .saves import Saves
from .step import run_loop
from .stop import stop_on_signal

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog

Costs = Mapping[str, Mapping[str, float]]

__all__ = ["RunResult", "train"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    status: Literal["done", "stopped"]
    step: int
    """Steps completed."""
    resume_command: str
    """Command that resumes the run from here."""


def train(
    plan: Plan,
    *,
    catalog: Catalog,
    resume: Path | None = None,
    continues: bool = False,
    overrides: Sequence[str] = (),
    listeners: Sequence[Callable[[Event], None]] = (),
) -> RunResult:
    """Run a plan, or resume one from its run folder or from one of its checkpoint folders.

    continues: `run.dir` may hold a run: it is resumed from its newest checkpoint, or starts again if it has none.

    After a process was lost, the run starts again up to `run.restarts` times.

    Raises PlanRejected before anything is built, DataError for invalid prompts, CheckpointError when the checkpoint is
    broken or belongs to another plan. Whatever is raised later, completed steps are checkpointed.
    """
    verdict = match(plan, catalog=catalog)
    if not verdict.accepted:
        raise PlanRejected("\n".join(str(reason) for reason in verdict.reasons))
    on_cuda = False if plan.run.device == "cpu" else None
    with batch_invariant(on_cuda=on_cuda) if plan.run.batch_invariant else nullcontext():
        data = read_data(plan)
        with run_folder(plan, resume, continues=continues) as folder:
            if continues and Checkpoints(folder.path / CHECKPOINTS).steps():
                resume = folder.path
            plan = with_run_folder(with_batch_invariance(plan), folder.path)

            def attempt(resume: Path | None, findings: Sequence[str]) -> RunResult:
                run = _Run(plan, folder, data, catalog=catalog, resume=resume, findings=findings)
                return run.train(overrides, listeners)

            return with_restarts(attempt, limit=plan.run.restarts, folder=folder.path, resume=resume)


class _Run:
    """One run of a plan in its locked folder."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        data: RunData,
        *,
        catalog: Catalog,
        resume: Path | None,
        findings: Sequence[str],
    ) -> None:
        self._plan, self._catalog, self._data = plan, catalog, data
        self._folder = folder.path
        self._findings = [*findings, *([folder.stale] if folder.stale and not findings else [])]
        self._checkpoints = Checkpoints(folder.path / CHECKPOINTS, keep=plan.run.keep)
        self._checkpoints.clear()
        self._checkpoint = checkpoint_to_resume(plan, self._checkpoints, resume, data=data)
        self._start = self._checkpoint.step if self._checkpoint else 0
        is_foreign = any(one.is_foreign for one in named_code(plan, catalog=catalog))
        self._resume_command = f"unirl train --resume {folder.path}{f' {FLAG}' if is_foreign else ''}"

    def train(self, overrides: Sequence[str], listeners: Sequence[Callable[[Event], None]]) -> RunResult:
        event = loading(self._plan, step=self._start)
        for listener in listeners:
            listener(event)
        with built_parts(self._plan, catalog=self._catalog) as parts:
            self._restore(parts)
            trackers = {key: build_part(choice, self._catalog) for key, choice in self._plan.trackers.items()}
            predicted = predicted_costs(self._plan, parts, self._data.prompts, self._checkpoint)
            parts = dataclasses.replace(parts, speed=self._speed(parts))
            # Every check has passed by now, so a refused plan leaves no folder behind.
            write_recipe(self._folder, self._plan, overrides, hashes=self._data.hashes)
            remove_samples(self._folder, start=self._start)
            events = EventStream(self._folder / EVENTS_FILE, step=self._start)
            for listener in (*listeners, self._catalog.emit):
                events.listen(listener)
            return self._recorded(parts, events, Trackers(trackers, events), predicted)

    def _speed(self, parts: Parts) -> Speed | None:
        """Operations of a step, where there is a device to rate, or a peak is set."""
        peak = self._plan.run.peak_tflops or peak_tflops_of(parts.device_name)
        flops = self._catalog.step_flops(self._plan) if parts.device_name or peak else {}
        return Speed(flops=flops, peak_tflops=peak) if flops else None

    def _restore(self, parts: Parts) -> None:
        checkpoint = self._checkpoint
        if checkpoint is not None:
            states = checkpoint.state.get("algorithms", {})
            for name, algorithm in parts.algorithms.items():
                resume_algorithm(algorithm, states.get(name, {}), folder=checkpoint.folder)
            for name, backend in parts.backends.items():
                backend.load(checkpoint.backend_folder(name))

    def _recorded(self, parts: Parts, events: EventStream, trackers: Trackers, predicted: Costs) -> RunResult:
        """Run the steps; whatever happens, the events and the trackers get an end."""
        began, step, status, problem = time.perf_counter(), None, "failed", ""
        try:
            step, status = self._steps(parts, events, trackers, predicted)
            return RunResult(folder=self._folder, status=status, step=step, resume_command=self._resume_command)
        except Exception as error:
            problem = f"{error}" if isinstance(error, UniRLError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, UniRLError) or error.__cause__ is not None:
                error.add_note(write_traceback(self._folder, error))
            if note := self._catalog.explain_failure(self._plan, error):
                error.add_note(note)
                problem += f"\n{note}"
            if self._checkpoints.steps():
                error.add_note(f"Completed steps are saved; resume with `{self._resume_command}`.")
            raise
        finally:
            last = events.last_step if step is None else step
            try:
                for failure in self._catalog.failures:
                    events.finding(f"plugin {failure.plugin!r}: {failure.hook} failed: {failure.error}", step=last)
                wall_s, folder = time.perf_counter() - began, str(self._folder)
                events.emit("run_finished", step=last, status=status, wall_s=wall_s, folder=folder, error=problem)
            finally:
                trackers.finish(status, step=last)
                events.close()

    def _steps(
        self, parts: Parts, events: EventStream, trackers: Trackers, predicted: Costs
    ) -> tuple[int, Literal["done", "stopped"]]:
        """Announce the run, and train; returns the steps completed and whether they were all."""
        plan = self._plan
        trackers.start(
            RunInfo(
                name=plan.run.name or plan.recipe,
                folder=self._folder,
                plan_hash=plan.hash,
                config=plan.resolved,
                resumed_at=self._start if self._checkpoint else None,
            )
        )
        announce(events, plan, self._checkpoint, predicted=predicted)
        for finding in self._findings:
            events.finding(finding, step=self._start)
        exports = Exports(self._folder, plan, start=self._start, catalog=self._catalog)
        saves = Saves(plan, self._checkpoints, data=self._data, parts=parts, events=events)

        def after(step: int, scores: Mapping[str, float] | None) -> None:
            saves.check()
            exports.after(step, scores, parts, events)

        # Signals are handled until the last save is complete.
        with stop_on_signal() as stop, saves:
            return run_loop(
                parts,
                plan,
                prompts=self._data.prompts,
                held_out=self._data.held_out,
                start=self._start,
                events=events,
                trackers=trackers,
                save=saves.save,
                should_stop=lambda: stop.is_set,
                interrupting=stop.interrupting,
                after=after,
                was_evaluated=self._was_evaluated,
            )

    def _was_evaluated(self, step: int) -> bool:
        try:
            events = read_events(self._folder / EVENTS_FILE)
        except ValueError:
            # What reads the file for its own sake names the line. Nothing is evaluated twice for it.
            return True
        return any(event.kind == "evaluated" and event.step == step for event in events)
