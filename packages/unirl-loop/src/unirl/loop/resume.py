"""State in a checkpoint beside the backend's files, and whether a run can continue from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.core.data.run_data import RunData
from unirl.core.errors import CheckpointError
from unirl.core.roles import Algorithm
from unirl.core.specs.leaves import leaves
from unirl.core.specs.plan import Plan

from .algorithm_state import algorithm_state
from .checkpoints import Checkpoint, Checkpoints
from .run_folder import CHECKPOINTS

__all__ = ["checkpoint_state", "checkpoint_to_resume"]


def checkpoint_state(plan: Plan, *, data: RunData, algorithms: Mapping[str, Algorithm]) -> dict[str, Any]:
    """The state of a run that a checkpoint keeps, as plain JSON."""
    return {
        "plan_hash": plan.hash,
        "numbers": plan.numeric_leaves(),
        "steps": plan.run.max_steps,
        "data": dict(data.hashes),
        "algorithms": {name: algorithm_state(algorithm) for name, algorithm in algorithms.items()},
    }


def checkpoint_to_resume(
    plan: Plan, checkpoints: Checkpoints, resume: Path | None, *, data: RunData
) -> Checkpoint | None:
    """The checkpoint that a run continues from; None for a new run.

    resume: a run folder, whose newest checkpoint is used, or one of its checkpoint folders.
    Raises CheckpointError when it is broken, belongs to another recipe or other prompts, or is past the last step.
    """
    if resume is None:
        return None
    checkpoint = checkpoints.load(resume if resume.parent.name == CHECKPOINTS else None)
    absent = [key for key in ("plan_hash", "numbers", "steps") if key not in checkpoint.state]
    if absent:
        raise CheckpointError(
            f"{checkpoint.folder}: its manifest has no {absent[0]!r}; resume from an older checkpoint."
        )
    if checkpoint.state["plan_hash"] != plan.hash:
        # An older version may have hashed settings that do not count any more.
        then = plan.numeric_leaves(checkpoint.state["numbers"])
        now = json.loads(json.dumps(plan.numeric_leaves()))
        changed = [key for key in sorted({*then, *now}) if then.get(key, "absent") != now.get(key, "absent")]
        if changed:
            lines = "; ".join(
                f"{key} was {then.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}" for key in changed[:8]
            )
            raise CheckpointError(
                f"{checkpoint.folder}: this checkpoint belongs to another recipe: {lines}. "
                "Resume with the recipe that it was written by, or start a new run."
            )
    for key, then in checkpoint.state.get("data", {}).items():
        if data.hashes.get(key) != then:
            what = "prompts" if key.startswith("data.") else "code or files"
            raise CheckpointError(
                f"{key}: {leaves(plan.resolved).get(key, 'a file')} has changed since this run began, so the "
                f"resumed steps would use other {what}. Restore the old file, or start a new run."
            )
    if plan.run.max_steps < checkpoint.step:
        raise CheckpointError(
            f"run.max_steps: got {plan.run.max_steps}; {checkpoint.step} steps are done in {checkpoint.folder}. "
            f"Use {checkpoint.step + 1} or more to continue."
        )
    if 0 < plan.run.stop_at <= checkpoint.step:
        raise CheckpointError(
            f"run.stop_at: got {plan.run.stop_at}; {checkpoint.step} steps are done in {checkpoint.folder}. "
            f"Use {checkpoint.step + 1} or more, or run.stop_at=0 to run to the end."
        )
    return checkpoint
