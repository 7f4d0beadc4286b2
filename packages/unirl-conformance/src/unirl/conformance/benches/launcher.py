"""A launcher with the plan of a small run, to compare with the same run in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from unirl.core.config import RewardConfig
from unirl.core.data import Prompt
from unirl.core.errors import RewardFailed
from unirl.core.parts import Parts
from unirl.core.plan import Choice, Plan
from unirl.core.roles import Launcher, ScoreInput, Scores
from unirl.core.run import build_parts
from unirl.core.spec import LauncherSpec

from ..subjects import Selection, Subject, subjects
from ..verdicts import NotApplicable
from ..workbench.requests import PROMPTS
from .base import Bench
from .cell import LINEAR, Cell, CellBench

__all__ = ["FAILURE", "LauncherBench"]

FAILURE = "reward.pixels: sample 3 has no pixels that could be scored."


class FailingReward:
    def score(self, samples: ScoreInput) -> Scores:
        raise RewardFailed(FAILURE)

    def close(self) -> None:
        """Nothing is held."""


def build_failing_reward(config: RewardConfig, *, device: Any) -> FailingReward:
    return FailingReward()


@dataclass(frozen=True, kw_only=True)
class LauncherBench(Bench):
    def plan(self) -> Plan:
        """Two steps of the first model, engine, algorithm and backend of the catalog that go together, and that the
        launcher runs as it stands."""
        return self._launched_by(self._cells)

    def failing_plan(self) -> Plan:
        """The same with a reward that cannot score."""
        plan = self.plan()
        rewards = {
            key: dataclasses.replace(
                choice, spec=dataclasses.replace(choice.spec, build=f"{__name__}:build_failing_reward")
            )
            for key, choice in plan.rewards.items()
        }
        return dataclasses.replace(plan, rewards=rewards)

    def plan_without_checkpoint(self) -> Plan:
        """The same with a model whose checkpoint is an empty folder."""
        plan = self.plan()
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        config = dataclasses.replace(cast(Any, plan.model.config), **{plan.model.spec.path_key: str(empty)})
        return dataclasses.replace(plan, model=dataclasses.replace(plan.model, config=config))

    def launcher(self, plan: Plan) -> Launcher:
        assert plan.launcher is not None
        return cast(Launcher, self.workshop.build(self.subject.found("launcher"), plan.launcher.config))

    @contextmanager
    def launched(self, plan: Plan) -> Iterator[Cell]:
        """The run by the launcher, closed at the end as a run closes it."""
        launcher = self.launcher(plan)
        try:
            with self._open(launcher.launch(plan, catalog=self.workshop.catalog), plan) as cell:
                yield cell
        finally:
            launcher.close()

    @contextmanager
    def in_process(self, plan: Plan) -> Iterator[Cell]:
        """The run without any launcher."""
        with (
            torch.random.fork_rng(),
            self._open(build_parts(plan, catalog=self.workshop.catalog), plan) as cell,
        ):
            yield cell

    def save(self, cell: Cell, name: str) -> Path:
        """A checkpoint of the backend in a folder of its own."""
        folder = self.folder / name
        folder.mkdir()
        cell.parts.backend.save(folder)
        return folder

    @contextmanager
    def _open(self, parts: Parts, plan: Plan) -> Iterator[Cell]:
        try:
            yield Cell(
                plan=plan,
                parts=parts,
                training=self._cells.training,
                track=next(iter(plan.sampling)),
                prompts=[
                    Prompt(prompt_id=f"p{n}", text=text, metadata={"number": n}) for n, text in enumerate(PROMPTS[:2])
                ],
            )
        finally:
            for part in (parts.engine, *parts.rewards.values(), parts.backend):
                part.close()

    @property
    def _cells(self) -> CellBench:
        return self._cell_bench(self.workshop.shared(f"cell of launcher {self.subject.id}", self._fitting))

    def _fitting(self) -> Subject:
        """The first cell that fits, before others one whose engine is no program of its own: that takes 15 s to start.

        Raises NotApplicable when nothing that is installed goes together.
        """
        found = subjects(self.workshop.catalog, Selection(kinds=("cell",)))
        cells = [subject for subject in found if not subject.refused]
        for subject in sorted(cells, key=lambda subject: not self._cell_bench(subject).is_in_process):
            if not self.workshop.catalog.check_plan(self._launched_by(self._cell_bench(subject))):
                return subject
        raise NotApplicable(
            "no model, engine, algorithm and backend that are installed here go together under this launcher"
        )

    def _cell_bench(self, subject: Subject) -> CellBench:
        return CellBench(subject=subject, workshop=self.workshop, record=self.record, folder=self.folder)

    def _launched_by(self, cells: CellBench) -> Plan:
        found = self.subject.found("launcher")
        assert isinstance(found.spec, LauncherSpec)
        plan = cells.plan(cells.training, **LINEAR)
        choice = Choice(
            key="launcher",
            spec=found.spec,
            config=self.workshop.config(found),
            dist=found.dist,
            version=found.version,
        )
        run = dataclasses.replace(plan.run, device=self.device)
        return dataclasses.replace(plan, launcher=choice, run=run)
