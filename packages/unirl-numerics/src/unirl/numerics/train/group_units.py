"""Whole groups as units, for losses that compare all samples of a prompt with each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import Track

from .track_advantages import track_advantages

__all__ = ["compared_weights", "unit_centred", "unit_mean", "with_group_units"]


def with_group_units(
    track: Track, config: AdvantageConfig, *, reward_weights: Mapping[str, float]
) -> tuple[Track, Mapping[str, float]]:
    """The track with advantages and its groups as units. Samples of a group without two different rewards weigh
    nothing, so no forward is spent on them.

    Returns also numbers for the log: those of the advantages.
    """
    track, numbers = track_advantages(track, config, reward_weights=reward_weights)
    track = dataclasses.replace(track, unit_ids=track.group_ids)
    return dataclasses.replace(track, sample_weights=_of_unequal(track)), numbers


def compared_weights(track: Track) -> Tensor:
    """[n]: weights of the samples, 0 in units without two different advantages.

    Raises BatchError for a unit of several prompts: their normalizing constants differ.
    """
    for rows in track.units():
        ids, texts = ([of[row] for row in rows] for of in (track.sample_ids, track.inputs.texts))
        if len(set(texts)) > 1:
            raise BatchError(
                f"algorithm: got samples {ids} of the prompts {texts} as a group, expected one prompt: samples are "
                "compared with others of the same prompt. Set stages.STAGE.group=parent."
            )
    return _of_unequal(track)


def unit_mean(values: Tensor, track: Track) -> Tensor:
    """The mean over the unit of each row, [n, ...] as `values`. Rows of weight 0 do not count, whatever their value;
    other weights count as 1. 0 in a unit of such rows alone."""
    counted = _counted(track, like=values)
    kept = torch.where(counted, values, 0.0)
    places, means = [0] * track.num_rows, list[Tensor]()
    for number, rows in enumerate(track.units()):
        means.append(kept[rows].sum(dim=0) / counted[rows].sum(dim=0).clamp_min(1))
        for row in rows:
            places[row] = number
    return torch.stack(means)[places] if means else kept


def unit_centred(values: Tensor, track: Track) -> Tensor:
    """Values without the mean over their unit, see `unit_mean`; 0 at rows of weight 0."""
    return torch.where(_counted(track, like=values), values - unit_mean(values, track), 0.0)


def _of_unequal(track: Track) -> Tensor:
    advantages = track.advantages
    assert advantages is not None
    result = track.sample_weights.clone()
    # Once to the CPU: each number of a tensor elsewhere is a transfer.
    values, weights = ([float(number) for number in of.cpu()] for of in (advantages, result))
    for rows in track.units():
        if len({values[row] for row in rows if weights[row]}) < 2:
            result[rows] = 0.0
    return result


def _counted(track: Track, *, like: Tensor) -> Tensor:
    return (track.sample_weights > 0).view(-1, *(1,) * (like.ndim - 1))
