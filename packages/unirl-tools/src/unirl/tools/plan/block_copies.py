"""Bytes that `backend.offload_frozen` copies to each device in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unirl.core.types.sampling import LatentSamplingConfig

from .model_size import ModelSize
from .prediction import StepTime

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

__all__ = ["copied_bytes"]


def copied_bytes(
    stage: Stage,
    size: ModelSize,
    *,
    train_rows: int,
    rows: int,
    micro_batch: int,
    generates: bool,
    is_serial: bool,
    further: Sequence[tuple[int, int]] = (),
    fakes: int = 0,
) -> StepTime:
    """Bytes by phase: each forward of the model and each backward pass through it copies all of its blocks.

    train_rows: rows that a sample is trained on.  rows: samples of the device in a step.  micro_batch: samples of a
    micro-batch.  generates: whether the device also samples with the weights.  is_serial: see `TrainConfig`.
    further: samples of the device in a step that are not trained on, with the denoise steps of each.
    fakes: steps of a fake score for each update; 0 without one.
    """
    train = stage.train
    updates = train.updates_per_step
    micro_batches = updates * math.ceil(math.ceil(rows / updates) / micro_batch)
    steps = train_rows // size.step_rows if is_serial else 1
    # A loss that chooses its own points takes one branch of the guidance; without gradients of the negative branch
    # each has a forward of its own.
    forwards = 1 if size.step_rows == 1 else size.step_rows if train.detach_negative else size.step_forwards
    backwards = 1 if train.detach_negative else forwards
    scored = micro_batches * steps * size.blocks_bytes
    batch = vars(stage.engine.config).get("forward_batch") or rows
    sampling = stage.sampling
    if isinstance(sampling, LatentSamplingConfig):
        sampled = sampling.num_inference_steps * size.step_forwards
    else:
        sampled = sampling.max_new_tokens
    passes = math.ceil(rows / batch) * sampled
    for count, denoised in further:
        batch = vars(stage.engine.config).get("forward_batch") or count
        passes += math.ceil(count / batch) * denoised * size.step_forwards
    share = train.replayed_share(critic=stage.needs.critic) if stage.needs.log_probs != "none" else 0
    return StepTime(
        generate=passes * size.blocks_bytes if generates else 0,
        old_log_probs=round(scored * forwards * share),
        reference=scored * forwards if stage.needs.reference == "policy" else 0,
        # A fake score is called in the policy's loss, and in its own after the student.
        train=scored * (forwards + backwards + (forwards + fakes * (2 * forwards + backwards) if fakes else 0)),
    )
