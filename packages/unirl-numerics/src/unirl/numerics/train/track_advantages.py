"""The advantages of a track, by the recipe's `advantage` settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import Track

from ..loss.advantages import Mode, Scope, combine_rewards

__all__ = ["advantages_of", "counted_rewards", "track_advantages"]


def track_advantages(
    track: Track,
    config: AdvantageConfig,
    *,
    reward_weights: Mapping[str, float],
    shaping: Mapping[str, Tensor] | None = None,
    earlier: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> tuple[Track, dict[str, float]]:
    """The track with its advantages [N], and numbers for the log.

    reward_weights: factor of each of the track's `reward_parts` that counts, where the track itself has none.
    shaping: name -> [N], terms that the algorithm adds to the reward, such as an overlong penalty; each counts as
    one more reward of factor 1 and appears neither in the track's `rewards` nor in its `reward_parts`.
    earlier: group -> name -> scores of samples that are not in the track, equally many of each reward. They take part
    in the means and standard deviations as further members of that group.

    Raises ValueError as `combine_rewards` does.
    """
    added = dict(shaping or {})
    parts, weights = counted_rewards(track, reward_weights)
    every, group_ids, rows = {**parts, **added}, track.group_ids, track.sample_weights
    for group, scores in (earlier or {}).items():
        every = {name: torch.cat([part, part.new_tensor(scores[name])]) for name, part in every.items()}
        group_ids += (group,) * (len(every[next(iter(every))]) - len(group_ids))
    rows = torch.cat([rows, rows.new_ones(len(group_ids) - track.num_rows)])
    result = combine_rewards(
        every,
        weights={**weights, **dict.fromkeys(added, 1.0)},
        group_ids=group_ids,
        mode=cast(Mode, config.combine),
        scope=cast(Scope, config.scope),
        center=cast(Scope, config.center),
        ddof=1 if config.ddof else 0,
        eps=config.eps,
        normalize=config.normalize,
        leave_one_out=config.leave_one_out,
        clip=config.clip,
        row_weights=rows,
    )
    values = result.values[: track.num_rows]
    numbers = {
        "advantage_abs_mean": float(values.abs().mean()),
        "groups": float(result.num_groups),
        "zero_spread_groups": float(result.num_zero_spread_groups),
        "singleton_groups": float(result.num_singleton_groups),
    }
    return dataclasses.replace(track, advantages=values), numbers


def counted_rewards(track: Track, reward_weights: Mapping[str, float]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """name -> [N] scores, and name -> factor in this step, of each reward of `reward_weights`.

    A score that does not count, at factor 0, is 0 where a sample lacks it.
    """
    weights = {name: track.reward_weights.get(name, weight) for name, weight in reward_weights.items()}
    parts = {name: track.reward_parts[name] for name in weights}
    return {name: part if weights[name] else part.nan_to_num(nan=0.0) for name, part in parts.items()}, weights


def advantages_of(track: Track) -> Tensor:
    """Advantages of a latent track for its surrogate: [n, R] of the scored steps where the segment has them, else [n].

    Raises BatchError if neither was computed.
    """
    result = track.latent.advantages if track.latent.advantages is not None else track.advantages
    if result is None:
        raise BatchError(f"Track {track.name!r}: it has no advantages; `Algorithm.advantages` computes them.")
    return result
