"""The advantages of a track, by the recipe's `advantage` settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import Track

from ..loss.advantages import Mode, Scope, combine_rewards

__all__ = ["advantages_of", "track_advantages"]


def track_advantages(
    track: Track,
    config: AdvantageConfig,
    *,
    reward_weights: Mapping[str, float],
    shaping: Mapping[str, Tensor] | None = None,
) -> tuple[Track, dict[str, float]]:
    """The track with its advantages [N], and numbers for the log.

    reward_weights: factor of each of the track's `reward_parts` that counts, where the track itself has none.
    shaping: name -> [N], terms that the algorithm adds to the reward, such as an overlong penalty; each counts as
    one more reward of factor 1 and appears neither in the track's `rewards` nor in its `reward_parts`.

    Raises ValueError as `combine_rewards` does.
    """
    added = dict(shaping or {})
    weights = {name: track.reward_weights.get(name, weight) for name, weight in reward_weights.items()}
    # A sample may lack a score that does not count.
    parts = {name: track.reward_parts[name] for name in weights}
    parts = {name: part if weights[name] else part.nan_to_num(nan=0.0) for name, part in parts.items()}
    result = combine_rewards(
        {**parts, **added},
        weights={**weights, **dict.fromkeys(added, 1.0)},
        group_ids=track.group_ids,
        mode=cast(Mode, config.combine),
        scope=cast(Scope, config.scope),
        center=cast(Scope, config.center),
        ddof=1 if config.ddof else 0,
        eps=config.eps,
        normalize=config.normalize,
        leave_one_out=config.leave_one_out,
        clip=config.clip,
        row_weights=track.sample_weights,
    )
    numbers = {
        "advantage_abs_mean": float(result.values.abs().mean()),
        "groups": float(result.num_groups),
        "zero_spread_groups": float(result.num_zero_spread_groups),
        "singleton_groups": float(result.num_singleton_groups),
    }
    return dataclasses.replace(track, advantages=result.values), numbers


def advantages_of(track: Track) -> Tensor:
    """Advantages of a latent track for its surrogate: [n, R] of the scored steps where the segment has them, else [n].

    Raises BatchError if neither was computed.
    """
    result = track.latent.advantages if track.latent.advantages is not None else track.advantages
    if result is None:
        raise BatchError(f"Track {track.name!r}: it has no advantages; `Algorithm.advantages` computes them.")
    return result
