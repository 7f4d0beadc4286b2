"""Settings and checks of losses that compare samples of a prompt with each other: whole groups, or pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.match.training import units_of_a_rank
from unirl.core.specs.part_config import PartConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["PairsConfig", "split_groups"]


@dataclass
class PairsConfig(PartConfig):
    """Settings of losses on preference pairs. An algorithm's config inherits from it."""

    pairs_per_group: int = limit(1, least=1)
    """Pairs made of each group: the best sample with the worst one, the second best with the second worst, and so on,
    as far as their rewards differ."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also settings that leave no pair, or split one."""
        yield from super().problems(plan, stage)
        yield from _compared(plan, stage, pairs=self.pairs_per_group)


def split_groups(plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
    """Reasons against settings that split a group, or leave nothing to compare in it, and against advantages that do
    not sum to 0 in it."""
    yield from _compared(plan, stage)
    if stage is not None and (factor := stage.advantage.positive_factor):
        yield Reason(
            key="advantage.positive_factor",
            text=f"got {factor!r}, expected none: {_name(stage)} needs advantages that sum to 0 over the samples of a "
            "prompt.",
        )


def _compared(plan: Plan | None, stage: Stage | None, *, pairs: int = 0) -> Iterator[Reason]:
    """pairs: of a group, at most; 0 compares all of its samples that are kept."""
    if plan is None or stage is None:
        return
    own, name, compared = stage.advantage, _name(stage), plan.rows_compared(stage)
    kept, most = own.keep_best + own.keep_worst, stage.train.micro_batch_size
    if compared < 2 and own.center == "global":
        # With `center: group` every plan is refused.
        yield Reason(
            key="data.samples_per_prompt",
            text=f"got {stage.samples}, expected 2 or more: {name} compares samples of the same prompt.",
        )
    if kept == 1:
        yield Reason(
            key=f"advantage.{'keep_best' if own.keep_best else 'keep_worst'}",
            text=f"got 1, which keeps one sample of a group; {name} compares samples of the same prompt. Keep 2 or "
            "more, such as the best and the worst.",
        )
    group = min(compared, kept or compared)
    if group < 2:
        return
    size, of = (2, "a pair") if pairs else (group, "a prompt")
    if 0 < most < size:
        yield Reason(
            key="train.micro_batch_size",
            text=f"got {most}, expected 0 or at least {size}: {name} compares the {size} samples of {of} in one "
            f"micro-batch.{' To save memory, use train.replay=serial, or fewer samples of a prompt.' * (size > 2)}",
        )
    units, where = units_of_a_rank(plan, stage, of_group=min(pairs, group // 2) if pairs else 1)
    if units < stage.train.updates_per_step <= units_of_a_rank(plan, stage, of_group=group)[0]:
        yield Reason(
            key="train.updates_per_step",
            text=f"got {stage.train.updates_per_step}, expected at most {units}, the {'pairs' if pairs else 'groups'} "
            f"{where}: {name} never splits one.",
        )


def _name(stage: Stage) -> str:
    return "the algorithm" if stage.algorithm is None else f"algorithm {stage.algorithm.name!r}"
