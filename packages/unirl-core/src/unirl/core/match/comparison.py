"""Checks of the groups that samples are compared in, and of the samples that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..limits import Reason

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["comparison", "rows_trained"]


def rows_trained(plan: Plan, stage: Stage) -> int:
    """Samples of a rollout that a stage trains on, at most."""
    compared, kept = plan.rows_compared(stage), stage.advantage.keep_best + stage.advantage.keep_worst
    groups = plan.data.prompts_per_step * plan.rows_per_prompt(stage) // compared
    return groups * min(kept or compared, compared)


def comparison(plan: Plan, stage: Stage, at: Callable[[str], str]) -> Iterator[Reason]:
    """at: section -> its key for this stage."""
    own, compared, compares = stage.advantage, plan.rows_compared(stage), stage.needs.compares_groups
    samples = "data.samples_per_prompt"
    if stage.parent is not None or stage.settings.samples:
        samples = f"stages.{stage.name}.samples"
    if compared < 2 and own.center == "group" and compares:
        yield Reason(
            key=samples,
            text=f"got {stage.samples}, so every group has zero variance and all advantages would be 0; use 2 or more, "
            f"or {at('advantage')}.center=global.",
        )
    for name in ("values", "keep_best", "keep_worst"):
        value = getattr(own, name)
        if value not in ("scores", 0) and not compares:
            assert stage.algorithm is not None
            yield Reason(
                key=f"{at('advantage')}.{name}",
                text=f"got {value}, but algorithm {stage.algorithm.name!r} does not compare the samples of a group; "
                "leave it out.",
            )
    if own.keep_best + own.keep_worst > compared:
        names = [name for name in ("keep_best", "keep_worst") if getattr(own, name)]
        yield Reason(
            key=f"{at('advantage')}.{names[0]}",
            text=f"got {' + '.join(f'{name} {getattr(own, name)}' for name in names)}, expected at most {compared}, "
            f"the samples of a group. Use fewer, or raise {samples}.",
        )
