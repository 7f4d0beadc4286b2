"""Groups as units: means over the counted samples, and which groups count."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_kept_samples import a_track
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import Track
from unirl.numerics.train.group_units import compared_weights, unit_centred, unit_mean, with_group_units

REWARDS = {"one": 1.0}


def units(rewards: list[float], groups: list[str], *, weights: list[float] | None = None) -> Track:
    track = a_track(rewards, groups)
    if weights is not None:
        track = dataclasses.replace(track, sample_weights=torch.tensor(weights))
    return with_group_units(track, AdvantageConfig(normalize=False), reward_weights=REWARDS)[0]


def test_means_are_over_the_counted_samples_of_each_group_in_any_order() -> None:
    track = units([1.0, 0.0, 2.0, 0.0, 5.0], ["a", "b", "a", "b", "a"], weights=[1.0, 1.0, 0.5, 1.0, 0.0])
    track = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 1.0, 0.5, 1.0, 0.0]))
    values = torch.tensor([[1.0, 10.0], [4.0, 0.0], [3.0, 30.0], [8.0, 2.0], [math.nan, math.inf]])
    assert unit_mean(values, track)[:4].tolist() == [[2.0, 20.0], [6.0, 1.0], [2.0, 20.0], [6.0, 1.0]]
    centred = unit_centred(values, track)
    assert centred.tolist() == [[-1.0, -10.0], [-2.0, -1.0], [1.0, 10.0], [2.0, 1.0], [0.0, 0.0]]


def test_values_of_weight_0_have_no_gradient_and_spoil_none() -> None:
    track = units([1.0, 0.0, 2.0], ["a", "a", "a"], weights=[1.0, 1.0, 0.0])
    values = torch.tensor([1.0, 3.0, math.nan], requires_grad=True)
    unit_centred(values, track)[0].backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, -0.5, 0.0]


def test_groups_of_equal_rewards_and_of_one_weigh_nothing() -> None:
    track = units([0.5, 0.5, 0.1, 0.9, 0.7], ["a", "a", "b", "b", "c"])
    assert track.unit_ids == track.group_ids
    assert track.sample_weights.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert compared_weights(track).tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_group_whose_other_sample_does_not_count_weighs_nothing() -> None:
    track = units([0.5, 0.7], ["a", "a"], weights=[1.0, 0.0])
    assert track.sample_weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rows", [[2, 3], [0, 1]])
def test_a_unit_alone_has_the_values_that_it_has_among_others(rows: list[int]) -> None:
    """As micro-batches need it."""
    track = units([0.2, 0.4, 0.1, 0.9], ["a", "a", "b", "b"])
    values = torch.tensor([0.3, 0.1, 0.7, 0.2], dtype=torch.float64)
    assert torch.equal(unit_mean(values, track)[rows], unit_mean(values[rows], track.select(rows)))
