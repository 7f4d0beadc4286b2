"""Advantages of the paths of a tree, and pruning. The tree is read from the keys of the noise that a rollout drew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.batch import rows_by_group
from unirl.core.types.track import Track
from unirl.numerics.train.track_advantages import compared

__all__ = ["path_advantages", "without_steps"]


def path_advantages(
    track: Track, config: AdvantageConfig, *, reward_weights: Mapping[str, float], path_weight: float
) -> Tensor:
    """[N, R] fp32, R as the segment's scored steps: each depth is normalised over its distinct paths.

    The reward of a path is the mean of its leaves' rewards, weighted as `BranchGrpoConfig.path_weight` says. Samples of
    weight 0 count nowhere. An empty slot and a step that all samples of a group share get 0.
    """
    segment = track.latent
    steps, rewards = segment.scored_steps.cpu(), {name: track.reward_parts[name].double() for name in reward_weights}
    if path_weight and segment.log_probs is None:
        raise BatchError(f"algorithm.path_weight: got {path_weight}, but the engine gave no log-probs; set it to 0.")
    log_probs = torch.zeros(steps.shape) if segment.log_probs is None else segment.log_probs.cpu()
    # Tensors that no statistic reads are not copied for every depth.
    light = dataclasses.replace(track, segment=None, conditions={}, media=None, rewards=None)
    columns: list[Tensor] = []
    for column in range(steps.shape[1]):
        is_live = (track.sample_weights.cpu() > 0) & (steps[:, column] >= 0)
        paths = list(rows_by_group(_paths(track, steps[:, column].tolist())).values())
        below = path_weight * log_probs[:, column + 1 :].double().sum(dim=1)
        below = torch.where(is_live, below, torch.full_like(below, -math.inf))
        shares = [below[rows].softmax(dim=0) if is_live[rows].any() else torch.zeros(len(rows)) for rows in paths]
        fused = {
            name: torch.stack([_weighted(values[rows], share) for rows, share in zip(paths, shares, strict=True)])
            for name, values in rewards.items()
        }
        firsts = light.select([rows[0] for rows in paths])
        lives = torch.stack([is_live[rows].any() for rows in paths])
        own = torch.zeros(track.num_rows)
        values = compared(firsts, fused, config, reward_weights=reward_weights, is_live=lives)
        for rows, value in zip(paths, values, strict=True):
            own[rows] = value
        columns.append(torch.where(is_live, own, torch.zeros_like(own)))
    return torch.stack(columns, dim=1) if columns else torch.zeros(steps.shape)


def without_steps(track: Track, skipped: list[int]) -> Track:
    """The track without these steps among those that are trained on; slots stay at the front of each row."""
    segment = track.latent
    steps = segment.scored_steps
    is_kept = (steps >= 0) & ~torch.isin(steps, torch.tensor(skipped, device=steps.device))
    width = int(is_kept.sum(dim=1).max())
    order = (~is_kept).int().argsort(dim=1, stable=True)[:, :width]
    moved = {
        name: torch.where(is_kept.to(value.device), value, 0).gather(1, order.to(value.device))
        for name, value in (("log_probs", segment.log_probs), ("advantages", segment.advantages))
        if value is not None
    }
    kept = torch.where(is_kept, steps, -1).gather(1, order)
    return dataclasses.replace(track, segment=dataclasses.replace(segment, train_steps=kept, **moved))


def _paths(track: Track, steps: list[int]) -> list[str]:
    """A name for the path of every row at its step of one depth."""
    keys = track.latent.step_noise_ids
    names = list(track.sample_ids)
    if keys is not None:
        names = [own[step] if step >= 0 else name for name, own, step in zip(names, keys, steps, strict=True)]
    return [f"{group}\n{name}" for group, name in zip(track.group_ids, names, strict=True)]


def _weighted(values: Tensor, shares: Tensor) -> Tensor:
    # The reward of a sample without weight may be NaN.
    return torch.where(shares > 0, values.cpu() * shares, 0.0).sum()
