"""Preference pairs of samples: which samples of a group make them, and which is the winner of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import Status, Track

from .track_advantages import track_advantages

__all__ = ["losers_of", "with_pairs"]


def with_pairs(
    track: Track, config: AdvantageConfig, *, reward_weights: Mapping[str, float], pairs_per_group: int = 1
) -> tuple[Track, Mapping[str, float]]:
    """The track with advantages, and as units the pairs of each group; samples in no pair have weight 0.

    pairs_per_group: the best sample with the worst one, the second best with the second worst, and so on, as far as
    their advantages differ, which are not clipped. A group without two different rewards has none.
    Returns also numbers for the log: those of the advantages, `pairs` and `groups_without_pair`.
    """
    # A clip would make equals of the samples beyond it, and a pair's loss takes nothing but the order.
    config = dataclasses.replace(config, clip=None)
    track, metrics = track_advantages(track, config, reward_weights=reward_weights)
    assert track.advantages is not None
    values, weights = [float(value) for value in track.advantages], torch.zeros_like(track.sample_weights)
    units, num_pairs, without = list(track.sample_ids), 0, 0
    for group, rows in track.groups().items():
        counted = (row for row in rows if float(track.sample_weights[row]) and track.status[row] != Status.ABORTED)
        # By id where advantages are equal: the order of the rows must not matter.
        ranked = sorted(counted, key=lambda row: (values[row], track.sample_ids[row]))
        places = range(min(pairs_per_group, len(ranked) // 2))
        pairs = [(ranked[-1 - place], ranked[place]) for place in places]
        pairs = [pair for pair in pairs if values[pair[0]] > values[pair[1]]]
        for place, pair in enumerate(pairs):
            for row in pair:
                units[row], weights[row] = f"{group}/pair-{place}", track.sample_weights[row]
        num_pairs, without = num_pairs + len(pairs), without + (not pairs)
    numbers = {**metrics, "pairs": float(num_pairs), "groups_without_pair": float(without)}
    return dataclasses.replace(track, unit_ids=tuple(units), sample_weights=weights), numbers


def losers_of(track: Track) -> tuple[Tensor, Tensor]:
    """For each row the loser that it is compared with, itself where it is not a winner; and the weight of its pair.

    Returns [n] int64 and [n]: 0 except at winners, and at those of a pair without a preference.
    Raises BatchError for a unit of three samples or more, and for one of two prompts.
    """
    advantages = track.advantages
    assert advantages is not None
    losers, weights = list(range(track.num_rows)), torch.zeros_like(track.sample_weights)
    for rows in track.units():
        if len(rows) == 1:
            continue
        ids, texts = ([of[row] for row in rows] for of in (track.sample_ids, track.inputs.texts))
        if len(rows) != 2:
            raise BatchError(f"algorithm: got a unit of the samples {ids}, expected two: a winner and a loser.")
        if texts[0] != texts[1]:
            raise BatchError(
                f"algorithm: got samples {ids} of the prompts {texts} as a pair, expected one prompt: a preference "
                "is between samples of the same prompt. Set stages.STAGE.group=parent."
            )
        loser, winner = sorted(rows, key=lambda row: float(advantages[row]))
        if float(advantages[winner]) > float(advantages[loser]):
            losers[winner] = loser
            weights[winner] = torch.minimum(track.sample_weights[winner], track.sample_weights[loser])
    return torch.tensor(losers, device=weights.device), weights
