"""DRaFT against finite differences in fp64 of a sampler in NumPy, which shares no code with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unirl.algorithms.draft.algorithm import Draft, build
from unirl.algorithms.draft.config import DraftConfig
from unirl.conformance.doubles.smooth_sampler import (
    CLOSE,
    SIGMAS,
    STEPS,
    WEIGHTS,
    SmoothModel,
    gradient_of,
    loss_of,
    mean_reward,
    slope,
    smooth_score,
    stored_track,
    velocity,
)
from unirl.core.errors import RewardFailed, RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import forward_noise


def make(score: Any = smooth_score, **settings: Any) -> Draft:
    return build(
        DraftConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": 1.0, "shown": 0.0},
        train=TrainConfig(),
        seed=3,
        score=score,
    )


def last_steps(track: Track, count: int, weights: Any) -> Any:
    """Clean latents of the last `count` Euler steps with these weights, from the stored latents."""
    x = track.latent.latents[:, STEPS - count].double().numpy()
    for step in range(STEPS - count, STEPS):
        x = x + (SIGMAS[step + 1] - SIGMAS[step]) * velocity(weights, x, SIGMAS[step])
    return x


@pytest.mark.parametrize(("steps", "checkpointing"), [(1, True), (2, False), (STEPS, True), (STEPS, False)])
def test_the_gradient_of_the_last_steps_is_that_of_finite_differences(steps: int, checkpointing: bool) -> None:
    track = stored_track()
    expected = slope(lambda weights: -mean_reward(last_steps(track, steps, weights)))
    result = gradient_of(make(gradient_steps=steps, checkpointing=checkpointing), track)
    assert result == pytest.approx(expected, **CLOSE)


def test_noise_draws_average_the_gradient_of_one_step_from_noised_copies() -> None:
    """DRaFT-LV: x = (1 - s) x0 + s e, and x0' = x - s v(x, s)."""
    track, sigma, draws = stored_track(), SIGMAS[-2], 3
    x0 = track.latent.final.double().numpy()[:, None]
    noise = forward_noise(seed=3, ids=track.sample_ids, draws=draws, shape=x0.shape[2:]).double().numpy()
    x = (1 - sigma) * x0 + sigma * noise
    expected = slope(lambda weights: -mean_reward(x - sigma * velocity(weights, x, sigma)))
    assert gradient_of(make(noise_draws=draws), track) == pytest.approx(expected, **CLOSE)


def test_the_loss_is_the_negative_reward_of_the_rollout_itself() -> None:
    track = stored_track()
    loss, losses = loss_of(make(gradient_steps=2), track)
    assert float(loss.detach()) == pytest.approx(-mean_reward(track.latent.final.double().numpy()), **CLOSE)
    # Two steps of a few roundings each, of latents below 8.
    assert losses.metrics["latent_mismatch_max"].total <= 2 * 4 * 2**-24 * 8


def test_a_hinge_and_a_target_bend_the_loss_at_their_target() -> None:
    track = stored_track()
    rewards = np.array([mean_reward(row) for row in last_steps(track, 1, WEIGHTS)])
    middle = float(np.sort(rewards)[1])
    # Beyond the middle sample by more than fp32 rounds and differences move it.
    target = middle + 1e-3
    hinged = slope(lambda w: float(np.mean([max(target - mean_reward(r), 0) for r in last_steps(track, 1, w)])))
    bent = slope(lambda w: float(np.mean([abs(target - mean_reward(r)) for r in last_steps(track, 1, w)])))
    assert gradient_of(make(reward_loss="hinge", reward_target=target), track) == pytest.approx(hinged, **CLOSE)
    assert gradient_of(make(reward_loss="target", reward_target=target), track) == pytest.approx(bent, **CLOSE)
    nothing = make(reward_loss="hinge", reward_target=float(rewards.min()) - 0.1)
    assert np.abs(gradient_of(nothing, track)).max() == 0
    assert loss_of(nothing, track)[1].metrics["reward_at_target"].total == 3
    scaled = gradient_of(make(loss_scale=1e-3), track)
    assert 1e3 * scaled == pytest.approx(gradient_of(make(), track), **CLOSE)


def test_a_gradient_that_is_not_finite_names_reward_and_sample() -> None:
    def rooted(track: Track, media: Tensor) -> Tensor:
        """Finite scores; the root of 0 has an infinite slope, times 0."""
        return (media[:, 0] * 0).square().sqrt().flatten(1).mean(dim=1)

    says = r"reward.target: got a gradient that is nan for sample 'r0/p0/0' \(prompt 'prompt 0'\), though the score is"
    with pytest.raises(RewardFailed, match=says):
        gradient_of(make(rooted), stored_track())


def test_a_gradient_beyond_the_range_of_the_decoder_names_it() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.inf

    track, algorithm = stored_track(), make()

    class SteepModel(SmoothModel):
        def decode(self, latents: Tensor) -> Tensor:
            return super().decode(Steep.apply(latents))

    with pytest.raises(RunFailed, match=r"model: the decoder's gradient is .*inf for sample 'r0/p0/0'"):
        loss_of(algorithm, track, SteepModel())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["reward.shapes.weight=1"], "reward.shapes: algorithm 'draft' needs 'reward-differentiable'"),
        (["algorithm.gradient_steps=11"], "algorithm.gradient_steps: got 11 steps; expected at most"),
        (["algorithm.noise_draws=2"], "algorithm.gradient_steps: got 3 with noise_draws=2, expected 1"),
        (
            ["algorithm.noise_draws=2", "algorithm.gradient_steps=1", "sampling.kernel=ddim-eta"],
            "algorithm.noise_draws: got kernel ddim-eta",
        ),
        (
            ["algorithm.reward_loss=hinge"],
            "algorithm.reward_target: got null with reward_loss=hinge, expected a number",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-draft", overrides, catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    assert any(reason.startswith(says) for reason in reasons), reasons


def test_the_quickstart_is_accepted_with_and_without_noise_in_the_sampler() -> None:
    catalog = Catalog.discover()
    stochastic = ["sampling.kernel=flow-sde", "sampling.eta=0.7", "sampling.sde.mode=all"]
    for overrides in ([], stochastic):
        assert match(compose("quickstart-draft", overrides, catalog=catalog), catalog=catalog).accepted, overrides
