"""Advantages of single SDE steps against NumPy, step by step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.train.track_advantages import chosen_and_clipped, step_advantages

GROUPS = ("a", "a", "a", "b", "b")
ONE = ((1.0, 0.0), (3.0, -1.0), (2.0, 4.0), (0.0, 2.0), (6.0, 1.0))
TWO = ((0.5, 0.0), (0.0, 8.0), (0.25, 1.0), (7.0, 0.0), (1.0, 1.0))
WEIGHTS = {"one": 1.0, "two": 0.5}
PLAIN = AdvantageConfig(clip=None)


def a_track(
    *, sde_steps: list[list[int]] | None = None, train_steps: list[list[int]] | None = None, weights: float = 1.0
) -> Track:
    """Five samples of two groups with two SDE steps; the second has this weight."""
    steps = torch.tensor(sde_steps or [[2, 5]] * 5)
    segment = LatentSegment(
        latents=torch.zeros(5, 1, 1),
        positions=torch.full((5, 1), 8),
        sde_steps=steps,
        train_steps=None if train_steps is None else torch.tensor(train_steps),
        step_rewards={"one": torch.tensor(ONE), "two": torch.tensor(TWO)},
        sigmas=torch.linspace(1, 0, 9),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    return Track(
        name="image",
        sample_ids=tuple("abcde"),
        group_ids=GROUPS,
        inputs=Inputs.of_texts(GROUPS),
        metadata=({},) * 5,
        segment=segment,
        sample_weights=torch.tensor([1.0, weights, 1.0, 1.0, 1.0]),
        status=(Status.COMPLETED,) * 5,
        policy_version=(0,) * 5,
    )


def of_column(place: int, rows: list[list[int]]) -> np.ndarray:
    """(x - mean) / (std + eps) of the weighted gains of a step, in each of these groups of rows."""
    gains = WEIGHTS["one"] * np.array(ONE)[:, place] + WEIGHTS["two"] * np.array(TWO)[:, place]
    result = np.zeros(5)
    for group in rows:
        own = gains[group]
        result[group] = (own - own.mean()) / (own.std() + PLAIN.eps)
    return result


def test_a_step_is_compared_with_the_same_step_of_its_group() -> None:
    """fp32 against fp64: 1e-6 of numbers of order 1."""
    result = step_advantages(a_track(), PLAIN, reward_weights=WEIGHTS)
    for place in range(2):
        np.testing.assert_allclose(result[:, place], of_column(place, [[0, 1, 2], [3, 4]]), atol=1e-6)


def test_samples_of_weight_0_and_steps_that_a_group_lacks_count_nowhere() -> None:
    track = a_track(weights=0.0, sde_steps=[[2, 5]] * 3 + [[2, -1]] * 2)
    result = step_advantages(track, PLAIN, reward_weights=WEIGHTS)
    np.testing.assert_allclose(result[:, 0], of_column(0, [[0, 2], [3, 4]]), atol=1e-6)
    np.testing.assert_allclose(result[:, 1], of_column(1, [[0, 2]]), atol=1e-6)


def test_steps_that_are_not_trained_on_take_part_in_the_comparison_alone() -> None:
    """With `train_fraction` the scored steps differ from sample to sample, what they are compared with does not."""
    every = step_advantages(a_track(), PLAIN, reward_weights=WEIGHTS)
    result = step_advantages(a_track(train_steps=[[5], [2], [-1], [2], [5]]), PLAIN, reward_weights=WEIGHTS)
    expected = [every[0, 1], every[1, 0], 0.0, every[3, 0], every[4, 1]]
    assert result.squeeze(1).tolist() == [float(value) for value in expected]


def test_a_reward_of_weight_0_needs_no_gains() -> None:
    scheduled = dataclasses.replace(a_track(), reward_weights={**WEIGHTS, "seen": 0.0})
    result = step_advantages(scheduled, PLAIN, reward_weights={**WEIGHTS, "seen": 3.0})
    assert torch.equal(result, step_advantages(a_track(), PLAIN, reward_weights=WEIGHTS))


def test_a_factor_multiplies_the_positive_advantages_of_steps() -> None:
    steps, factors = torch.tensor(ONE), torch.tensor([0.5, 2.0, 4.0, 3.0, 0.25])
    track = dataclasses.replace(a_track(), advantages=steps[:, 0], reward_parts={"far": factors})
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, advantages=steps))
    result, _ = chosen_and_clipped(track, dataclasses.replace(PLAIN, positive_factor="far"))
    assert result.advantages is not None and result.advantages.tolist() == [0.5, 6, 8, 0, 1.5]
    by_step = result.latent.advantages
    assert by_step is not None and by_step.tolist() == [[0.5, 0], [6, -1], [8, 16], [0, 6], [1.5, 0.25]]


def test_a_reward_without_gains_is_named() -> None:
    with pytest.raises(BatchError, match=r"no rewards of steps \(three\); the loop adds them"):
        step_advantages(a_track(), PLAIN, reward_weights={"one": 1.0, "three": 1.0})
