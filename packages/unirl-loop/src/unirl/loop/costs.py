"""Cost of a step, by formula: denoiser forwards and stored bytes, and from them the split between phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import TRAJECTORY_BYTES

__all__ = ["StepCost", "latent_step_cost"]

BACKWARD = 2
"""A backward pass costs about two forwards."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Counts are exact, in rows (one row = one sample through the denoiser once); the split is their ratio."""

    rollout_rows: int
    old_log_prob_rows: int
    train_rows: int
    stored_bytes: int

    @property
    def generate_share(self) -> float:
        """Predicted share of generation in generation plus training."""
        training = self.old_log_prob_rows + self.train_rows * (1 + BACKWARD)
        return self.rollout_rows / max(1, self.rollout_rows + training)


def latent_step_cost(request: LatentRequest, *, latent_shape: Sequence[int], anchors: bool) -> StepCost:
    """Cost of one step on a latent track.

    Rollout: N*T rows for each branch of the guidance, an upper bound where an engine shares the paths of a tree.
    Training: every scored step once forward and backward, once more forward when the old log-probs are replayed.
    Stored: positions {i, i+1 for scored step i}, T and `keep`, in `sampling.trajectory_dtype`.
    """
    rows, steps = request.num_rows, int(request.sigmas.shape[0]) - 1
    branches = request.num_branches
    scored_rows = int((request.scored_steps >= 0).sum())
    positions = 0
    for row, keep in zip(request.scored_steps, request.keep, strict=True):
        chosen = {int(step) for step in row} - {-1}
        kept = {int(position) for position in keep} - {-1}
        positions += len(chosen | {step + 1 for step in chosen} | {steps} | kept)
    return StepCost(
        rollout_rows=rows * steps * branches,
        old_log_prob_rows=scored_rows * branches if anchors else 0,
        train_rows=scored_rows * branches,
        stored_bytes=positions * prod(latent_shape) * TRAJECTORY_BYTES[request.sampling.trajectory_dtype],
    )
