"""Reference implementation of BranchGRPO, element by element, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from unirl.algorithms.branch_grpo.config import BranchGrpoConfig
from unirl.conformance.reference import LossInputs

__all__ = ["advantages_of_depth", "loss"]


def loss(config: BranchGrpoConfig, inputs: LossInputs) -> float:
    """Mean of PPO's clipped objective (arXiv 1707.06347, equation 7), to be minimised, over the steps of all samples.

    inputs.advantages: [n, S]; [n] where each sample has one for all of its steps.
    """
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    total, weights = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        for column, step in enumerate(inputs.sde_steps[row] if weight else ()):
            if step < 0:
                continue
            advantage = float(inputs.advantages[row] if inputs.advantages.ndim == 1 else inputs.advantages[row, column])
            ratio = math.exp(float(inputs.log_probs[row, column] - inputs.old_log_probs[row, column]))
            bounded = min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - config.clip_range)
            total, weights = total - float(weight) * advantage * bounded, weights + float(weight)
    return total / weights if weights else 0.0


def advantages_of_depth(
    rewards: Sequence[float],
    paths: Sequence[Any],
    *,
    log_probs_below: Sequence[float] | None = None,
    path_weight: float = 0.0,
    eps: float = 1e-4,
) -> list[float]:
    """[n] of the leaves of one group at one depth: (V - mean V) / (std V + eps) over the distinct paths.

    rewards: [n] of the leaves.  paths: [n], equal for leaves below one path.  log_probs_below: [n], sums over the steps
    from the path to the leaf.  V is the mean of the rewards below a path, weighted by exp(path_weight log_probs_below).
    """
    below = [0.0] * len(rewards) if log_probs_below is None else log_probs_below
    shares = [math.exp(path_weight * value) for value in below]
    value: dict[Any, float] = {}
    for path in paths:
        leaves = [leaf for leaf, own in enumerate(paths) if own == path]
        value[path] = sum(shares[leaf] * rewards[leaf] for leaf in leaves) / sum(shares[leaf] for leaf in leaves)
    spread = np.array(list(value.values()))
    return [float((value[path] - spread.mean()) / (spread.std() + eps)) for path in paths]
