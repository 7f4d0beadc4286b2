"""Advantages and returns of actions from a critic's values, and the critic's loss.

An action is a token of a text or a scored step of a trajectory, see `actions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from unirl.core.roles import Metric
from unirl.core.types.track import Track

from ..loss.policy_metrics import mean_over
from ..tokens.gae import gae
from ..tokens.value_loss import clipped_value_loss, explained_by_moments
from ..tokens.whitening import token_moments, whiten
from .actions import per_action, with_per_action

__all__ = ["value_losses", "with_advantages_from_values"]


def with_advantages_from_values(
    track: Track,
    rewards: Tensor,
    counted: Tensor,
    *,
    gamma: float,
    lam: float,
    whitens: bool,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> tuple[Track, dict[str, Metric]]:
    """The track with advantages and returns of its actions by GAE, and the metrics of `Algorithm.after_anchor`.

    track: with `values`.  rewards: [n, S] of each action, see `gae.token_rewards`.  counted: [n, S], the weight of each
    action; those of weight 0 count nowhere, whatever their numbers.  gamma, lam: see `gae`.
    whitens: advantages have mean 0 and variance 1 over the counted actions of all ranks.
    sum_over_ranks: as `Algorithm.after_anchor` is given it; called once.
    """
    valid = counted > 0
    values = torch.where(valid, per_action(track, "values"), 0.0)
    result = gae(rewards, values, valid, gamma=gamma, lam=lam)
    # An advantage is the critic's error: the return less the value.
    moments = sum_over_ranks(torch.stack([token_moments(x, valid).cpu() for x in (result.advantages, result.returns)]))
    explained = explained_by_moments(errors=moments[0], returns=moments[1])
    advantages = whiten(result.advantages, valid, moments=moments[0]) if whitens else result.advantages
    metrics = {
        "advantage_abs_mean": mean_over(advantages.abs(), counted),
        "returns_mean": mean_over(result.returns, counted),
        "values_mean": mean_over(values, counted),
        "explained_variance": Metric(total=explained or 0.0, weight=float(explained is not None)),
    }
    return with_per_action(track, advantages=advantages, returns=result.returns), metrics


def value_losses(
    track: Track, values: Tensor, counted: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """[n, S] of `clipped_value_loss` for each action, with gradient, and its metrics.

    track: with the `values` of the rollout and `returns`.  values: [n, S], the critic's now.  counted: [n, S] weights.
    clip: see `clipped_value_loss`; None turns it off.
    """
    is_counted = counted > 0
    now, before, returns = (
        torch.where(is_counted, x, 0.0) for x in (values, per_action(track, "values"), per_action(track, "returns"))
    )
    result = clipped_value_loss(now, before, returns, clip=math.inf if clip is None else clip)
    metrics = {
        "value_loss": mean_over(result.loss, counted),
        "value_clip_fraction": mean_over(result.clipped.float(), counted),
    }
    return result.loss, metrics
