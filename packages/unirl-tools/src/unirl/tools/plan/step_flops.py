"""Floating-point operations of a step, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .prediction import StepTime

if TYPE_CHECKING:
    from unirl.core.specs.memory import TrainingMemory
    from unirl.core.specs.plan import Stage

    from .model_size import ModelSize

__all__ = ["step_flops"]

FULL_BACKWARD, LORA_BACKWARD = 2, 1
"""A backward pass, in forwards: products for inputs and weights, or for inputs alone."""


def step_flops(
    *,
    stage: Stage,
    memory: TrainingMemory,
    size: ModelSize,
    samples: int,
    train_rows: int,
    further: Sequence[tuple[int, int]],
) -> StepTime:
    """Operations of each phase, over all processes.

    samples: of a step.  train_rows: rows of a forward pass that the loss needs for one sample.  further: samples of a
    prompt that are generated and not trained on, with the denoise steps of each.
    """
    row = size.flops * samples
    scored = row * train_rows
    passes = 1 + (LORA_BACKWARD if memory.lora_rank > 0 else FULL_BACKWARD) + memory.recomputes_blocks
    # Of branches without gradient there is a forward pass.
    kept = 1 / size.step_rows if stage.train.detach_negative else 1
    share = stage.train.replayed_share(critic=stage.needs.critic) if stage.needs.log_probs != "none" else 0
    # In the denoise steps of the samples that are trained on.
    own = stage.samples * getattr(stage.sampling, "num_inference_steps", 1)
    others = sum(count * steps for count, steps in further) / own
    return StepTime(
        generate=row * size.rollout_rows + round(row * size.rollout_rows * others),
        old_log_probs=round(scored * share),
        reference=scored if stage.needs.reference == "policy" else 0,
        train=round(scored * (kept * passes + 1 - kept) + _auxiliary(memory, size, scored, passes)),
    )


def _auxiliary(memory: TrainingMemory, size: ModelSize, scored: int, passes: float) -> float:
    """Operations of a critic or a fake score.

    scored: of one forward of all that is trained on.  passes: of a micro-batch of the policy, in forwards.
    """
    if memory.auxiliary == "fake score":
        # In the policy's loss once without gradient; in its own after the student, which has none.
        return scored * (1 + memory.auxiliary_steps * (1 + passes))
    if memory.auxiliary == "critic":
        # Values before the first update. It reads the positive conditions alone, and all its weights train.
        judged = scored / size.step_rows
        return judged * (1 + memory.auxiliary_steps * (1 + FULL_BACKWARD + memory.recomputes_blocks))
    return 0.0
