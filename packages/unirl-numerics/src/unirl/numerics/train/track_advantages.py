"""The advantages of a track, by the recipe's `advantage` settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import LatentSegment, Track

from ..loss.advantages import Mode, Scope, combine_rewards
from ..loss.rank_values import RewardValues

__all__ = [
    "advantages_of",
    "best_and_worst",
    "chosen_and_clipped",
    "compared",
    "counted_rewards",
    "step_advantages",
    "track_advantages",
    "whole_groups",
]


def track_advantages(
    track: Track,
    config: AdvantageConfig,
    *,
    reward_weights: Mapping[str, float],
    shaping: Mapping[str, Tensor] | None = None,
    earlier: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> tuple[Track, dict[str, float]]:
    """The track with its advantages [N], and numbers for the log.

    With `positive_factor` those above 0 are multiplied by the scores of that reward. With `keep_best` or `keep_worst`
    it has only these samples of each group, in their order, with the advantages that they have among all; rows of
    weight 0 are dropped as well.

    reward_weights: factor of each of the track's `reward_parts` that counts, where the track itself has none.
    shaping: name -> [N], terms that the algorithm adds to the reward, such as an overlong penalty; each counts as
    one more reward of factor 1, with its own values whatever `config.values` is, and appears neither in the track's
    `rewards` nor in its `reward_parts`.
    earlier: group -> name -> scores of samples that are not in the track, equally many of each reward. They take part
    in the statistics as further members of that group.

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
        values=dict.fromkeys(parts, cast(RewardValues, config.values)),
        spread_penalty=config.spread_penalty,
        shaping=added,
        scope=cast(Scope, config.scope),
        center=cast(Scope, config.center),
        ddof=1 if config.ddof else 0,
        eps=config.eps,
        normalize=config.normalize,
        leave_one_out=config.leave_one_out,
        row_weights=rows,
    )
    # Not clipped yet: the selection must tell samples beyond the bound from each other.
    values = result.values[: track.num_rows]
    numbers = {
        "groups": float(result.num_groups),
        "zero_spread_groups": float(result.num_zero_spread_groups),
        "singleton_groups": float(result.num_singleton_groups),
    }
    track, chosen = chosen_and_clipped(dataclasses.replace(track, advantages=values), config)
    return track, numbers | chosen


def compared(
    track: Track,
    scores: Mapping[str, Tensor],
    config: AdvantageConfig,
    *,
    reward_weights: Mapping[str, float],
    is_live: Tensor,
) -> Tensor:
    """[N] fp32 on the CPU: the advantages of these scores in place of the track's rewards; 0 where not live.

    scores: name -> [N], of the rewards of `reward_weights`.  is_live: [N] bool; the others count nowhere.
    """
    # Tensors that no statistic reads are not copied.
    light = dataclasses.replace(track, segment=None, conditions={}, media=None, rewards=None)
    scored, _ = track_advantages(
        dataclasses.replace(light, reward_parts=scores, sample_weights=is_live.to(track.sample_weights)),
        config,
        reward_weights=reward_weights,
    )
    assert scored.advantages is not None
    values = scored.advantages.cpu()
    return torch.where(is_live.cpu(), values, torch.zeros_like(values))


def step_advantages(track: Track, config: AdvantageConfig, *, reward_weights: Mapping[str, float]) -> Tensor:
    """[N, R] fp32 on the CPU, R as the segment's scored steps: what each step gained, compared with what the same step
    gained in the other samples; 0 in empty slots.

    Raises BatchError for a track without `LatentSegment.step_rewards` of a reward that has a weight.
    Source: DenseGRPO, arXiv 2601.20218, equation 10.
    """
    segment = track.latent
    # Those of weight 0 do not score the samples that are expected.
    weights = {name: weight for name, weight in reward_weights.items() if track.reward_weights.get(name, weight)}
    if missing := sorted(set(weights) - set(segment.step_rewards)):
        raise BatchError(
            f"Track {track.name!r}: it has no rewards of steps ({', '.join(missing)}); the loop adds them for an "
            "algorithm whose `Needs.step_rewards` is true."
        )
    steps, scored = segment.sde_steps.cpu(), segment.scored_steps.cpu()
    counts = track.sample_weights.cpu() > 0
    columns = [
        compared(
            track,
            {name: segment.step_rewards[name][:, place] for name in weights},
            config,
            reward_weights=weights,
            is_live=counts & (steps[:, place] >= 0),
        )
        for place in range(steps.shape[1])
    ]
    places = (scored[:, :, None] == steps[:, None, :]).int().argmax(dim=2)
    return torch.where(scored >= 0, torch.stack(columns, dim=1).gather(1, places), 0.0)


def whole_groups(config: AdvantageConfig) -> AdvantageConfig:
    """The settings without factor, selection and clip, for an algorithm that makes something of the advantages of all
    samples of a group, such as a ranking, before `chosen_and_clipped`."""
    return dataclasses.replace(config, positive_factor="", keep_best=0, keep_worst=0, clip=None)


def chosen_and_clipped(track: Track, config: AdvantageConfig) -> tuple[Track, dict[str, float]]:
    """The samples that `keep_best` and `keep_worst` choose, in their order, with clipped advantages; and numbers for
    the log, of all samples. Advantages of steps are clipped as those of samples are, and multiplied by
    `positive_factor` before, where they are positive (GARDO, arXiv 2512.24138, equation 8)."""
    assert track.advantages is not None
    numbers = dict[str, float]()
    if config.positive_factor:
        factor = track.reward_parts[config.positive_factor].nan_to_num(nan=0.0)
        if bool((positive := track.advantages > 0).any()):
            numbers["positive_factor_mean"] = float(factor[positive.to(factor.device)].mean())
        track = _changed(track, lambda values: torch.where(values > 0, values * _by_row(factor, values), values))
        assert track.advantages is not None
    numbers["advantage_abs_mean"] = float(_clipped(track.advantages, config).abs().mean())
    if config.keep_best + config.keep_worst:
        chosen = best_and_worst(track, best=config.keep_best, worst=config.keep_worst)
        numbers["samples_kept"] = float(len(chosen))
        # Rows of weight 0 take no step, and a track without rows could not be trained on.
        track = track.select(chosen) if chosen else track
    return _changed(track, lambda values: _clipped(values, config)), numbers


def _changed(track: Track, change: Callable[[Tensor], Tensor]) -> Track:
    """The track with other advantages, of samples [N] and of steps [N, R]."""
    assert track.advantages is not None
    track, segment = dataclasses.replace(track, advantages=change(track.advantages)), track.segment
    if isinstance(segment, LatentSegment) and segment.advantages is not None:
        track = dataclasses.replace(track, segment=dataclasses.replace(segment, advantages=change(segment.advantages)))
    return track


def _by_row(factor: Tensor, values: Tensor) -> Tensor:
    return factor.to(values).view(-1, *(1,) * (values.ndim - 1))


def _clipped(advantages: Tensor, config: AdvantageConfig) -> Tensor:
    return advantages if config.clip is None else advantages.clamp(-config.clip, config.clip)


def best_and_worst(track: Track, *, best: int, worst: int) -> list[int]:
    """Rows of the samples of each group with the highest and the lowest advantages, rising.

    A group has `best` + `worst` of them, all that it has if these are fewer. Among equal advantages the sample ids
    decide, so a group without a best keeps as many as any other, and the order of the rows does not matter. Rows of
    weight 0 are not chosen.
    """
    assert track.advantages is not None
    values = [float(value) for value in track.advantages]
    result: list[int] = []
    for rows in track.groups().values():
        counted = [row for row in rows if float(track.sample_weights[row])]
        ranked = sorted(counted, key=lambda row: (values[row], track.sample_ids[row]))
        low = ranked[:worst]
        result += low + ranked[max(len(ranked) - best, len(low)) :]
    return sorted(result)


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
