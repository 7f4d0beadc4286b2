"""SRPO against finite differences in fp64 of a sampler in NumPy, which shares no code with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unirl.algorithms.srpo.algorithm import Srpo, build
from unirl.algorithms.srpo.config import SrpoConfig
from unirl.conformance.doubles.smooth_sampler import (
    CLOSE,
    gradient_of,
    loss_of,
    mean_reward,
    slope,
    smooth_score,
    stored_track,
    velocity,
)
from unirl.core.errors import RewardFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import direct_align, forward_noise, forward_sigmas, noised


def make(score: Any = smooth_score, **settings: Any) -> Srpo:
    return build(
        SrpoConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": 1.0},
        train=TrainConfig(),
        seed=3,
        score=score,
    )


def test_the_clean_latents_are_recovered_where_the_velocity_is_the_true_one() -> None:
    """x0 = (x + (s' - s) v - s' e) / (1 - s') for v = e - x0, at every noise level, to the rounding of fp64."""
    x0, x1 = (
        torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2)
    )
    sigma = torch.linspace(0.02, 0.99, 20, dtype=torch.float64).view(5, 4)
    x = noised(x0, x1, sigma)
    for length in (0.01, 0.1, 1.0):
        after = (sigma - length).clamp(min=0)
        result = direct_align(x, x1 - x0, x1, sigma=sigma, sigma_next=after)
        # Divided by 1 - s', which is at least 0.02.
        torch.testing.assert_close(result, x0, rtol=0, atol=50 * 2**-50)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_the_gradient_is_that_of_finite_differences(discount: float) -> None:
    """With the formula as the paper has it, point by point."""
    track, count, length = stored_track(), 3, 0.2
    where = {"seed": 3, "ids": track.sample_ids, "draws": count}
    sigmas = forward_sigmas(**where).double().numpy()
    noise = forward_noise(**where, shape=track.latent.latents.shape[2:]).double().numpy()
    x0 = track.latent.final.double().numpy()

    def loss(weights: Any) -> float:
        total = scale = 0.0
        for row in range(len(x0)):
            for point in range(count):
                sigma, drawn = sigmas[row, point], noise[row, point]
                after, x = max(sigma - length, 0.0), (1 - sigma) * x0[row] + sigma * drawn
                clean = (x + (after - sigma) * velocity(weights, x, sigma) - after * drawn) / (1 - after)
                weight = discount ** (count - 1 - point)
                total, scale = total - weight * mean_reward(clean), scale + weight
        return total / scale

    assert [list(row) for row in sigmas.argsort(axis=1)] == [[0, 1, 2]] * 3, "the last point is the noisiest"
    result = gradient_of(make(num_points=count, step=length, discount=discount), track)
    assert result == pytest.approx(slope(loss), **CLOSE)


def prompted(track: Track, media: Tensor) -> Tensor:
    """Reads the prompt: a phrase of n letters before it asks for n times the brightness."""
    letters = torch.tensor([float(prompt.index("prompt")) for prompt in track.inputs.prompts])
    return smooth_score(track, media) + letters * media.flatten(1).mean(dim=1)


def test_phrases_give_a_relative_reward() -> None:
    """`good prompt` less `b prompt`: 5 - 2 times the brightness remains, and what both say alike is gone."""
    track = stored_track()
    relative = make(prompted, positive="good", negative="b")
    bright = make(lambda track, media: 3 * media.flatten(1).mean(dim=1))
    assert gradient_of(relative, track) == pytest.approx(gradient_of(bright, track), **CLOSE)
    assert float(loss_of(relative, track)[0].detach()) == pytest.approx(
        float(loss_of(bright, track)[0].detach()), **CLOSE
    )
    assert np.abs(gradient_of(make(prompted, positive="good"), track) - gradient_of(make(prompted), track)).max() > 1e-3


@pytest.mark.parametrize("inversion_points", [0, 1])
def test_a_reward_that_does_not_read_the_prompt_is_refused_with_a_negative_phrase(inversion_points: int) -> None:
    says = "got equal scores for prompts that begin with 'good' and with 'bad'"
    with pytest.raises(RewardFailed, match=says):
        gradient_of(make(positive="good", negative="bad", inversion_points=inversion_points), stored_track())


def worded(letters: int, clean: Any) -> float:
    """`prompted` in NumPy, after a phrase of that many letters and a space."""
    return mean_reward(clean) + (letters + 1) * float((0.5 + clean / 20).mean())


def test_inverted_levels_raise_the_reward_of_the_negative_phrase_towards_noise() -> None:
    """Equation 9, point by point: K -+ the step of the model, with the reward of one phrase at each."""
    track, count, length, inverted = stored_track(), 4, 0.2, 2
    where = {"seed": 3, "ids": track.sample_ids, "draws": count}
    sigmas = forward_sigmas(**where).double().numpy()
    noise = forward_noise(**where, shape=track.latent.latents.shape[2:]).double().numpy()
    x0 = track.latent.final.double().numpy()

    def loss(weights: Any) -> float:
        total = 0.0
        for row in range(len(x0)):
            for point in range(count):
                sigma, drawn = sigmas[row, point], noise[row, point]
                after = sigma + length if point < inverted else max(sigma - length, 0.0)
                x = (1 - sigma) * x0[row] + sigma * drawn
                clean = (x + (after - sigma) * velocity(weights, x, sigma) - after * drawn) / (1 - after)
                total -= worded(1 if point < inverted else 4, clean)
        return total / (len(x0) * count)

    settings = {"num_points": count, "step": length, "positive": "good", "negative": "b"}
    algorithm = make(prompted, inversion_points=inverted, **settings)
    assert gradient_of(algorithm, track) == pytest.approx(slope(loss), **CLOSE)
    _, losses = loss_of(algorithm, track)
    # The metric is of the levels with the reward: it must not mix both phrases.
    assert losses.metrics["reward_recomputed"].weight == len(x0) * (count - inverted)


def test_a_step_towards_noise_has_the_opposite_effect_of_one_towards_the_data() -> None:
    """The slope of the clean estimate in the velocity is (s' - s) / (1 - s'), and the estimate stays exact."""
    x0, x1 = (
        torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (4, 5)
    )
    sigma = torch.tensor([[0.1, 0.3], [0.2, 0.4], [0.3, 0.5]], dtype=torch.float64)
    x, true = noised(x0, x1, sigma), x1 - x0
    for length in (0.2, -0.1):
        after = sigma + length
        estimate = direct_align(x, true, x1, sigma=sigma, sigma_next=after)
        # Divided by 1 - s', which is at least 0.3: tens of roundings of 1e-16.
        torch.testing.assert_close(estimate, x0, rtol=0, atol=1e-13)
        moved = direct_align(x, true + 1, x1, sigma=sigma, sigma_next=after) - estimate
        expected = (length / (1 - after))[..., None].expand_as(moved)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sampling.kernel=ddim-eta"], "sampling.kernel: got kernel ddim-eta, expected a kernel of rectified flow"),
        (
            ["algorithm.positive=photo", "algorithm.negative=photo"],
            "algorithm.negative: got 'photo', which is algorithm.positive as well",
        ),
        (
            ["algorithm.negative=CG", "algorithm.inversion_points=4"],
            "algorithm.inversion_points: got 4, expected fewer than algorithm.num_points=4",
        ),
        (
            ["algorithm.negative=CG", "algorithm.inversion_points=2", "algorithm.step=0.5"],
            "algorithm.inversion_points: got 2 of 4 noise levels, from which steps of 0.5 lead to pure noise",
        ),
        (["algorithm.inversion_points=1"], "algorithm.inversion_points: got 1 without algorithm.negative"),
        (
            [
                "algorithm.negative=CG",
                "algorithm.inversion_points=1",
                "algorithm.reward_loss=hinge",
                "algorithm.reward_target=1",
            ],
            "algorithm.inversion_points: got 1 with reward_loss=hinge",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-srpo", overrides, catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    assert any(reason.startswith(says) for reason in reasons), reasons
