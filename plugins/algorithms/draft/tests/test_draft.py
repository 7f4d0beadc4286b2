"""DRaFT on a linear model in closed form: v = w x, decoded to 0.5 + x / 20, scored by the distance to a colour."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from unirl.algorithms.draft.algorithm import Draft, build
from unirl.algorithms.draft.config import DraftConfig
from unirl.core.loop.scoring import MediaScore
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Forward, Losses
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, Track
from unirl.numerics.forward_process import forward_noise
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.noise import noise
from unirl.numerics.train.track_replay import TrackReplay
from unirl.rewards.rules.config import PixelTargetConfig
from unirl.rewards.rules.pixel_target import PixelTargetReward

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
STEPS = 4
W = -0.6
TARGET = 0.4
WEIGHT = 2.0
CLOSE = {"rel": 1e-4, "abs": 1e-7}
"""Means over 48 fp32 numbers of order 1, each of a few operations of 6e-8, which partly cancel."""


class LinearModel:
    """v = w x, and images that are linear in the latents."""

    def __init__(self) -> None:
        self.w = torch.tensor(W, requires_grad=True)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Any) -> Tensor:
        return self.w * x

    def decode(self, latents: Tensor) -> Tensor:
        return image_of(latents)


def image_of(latents: Tensor) -> Tensor:
    """Within [0, 1] for latents below 10."""
    return 0.5 + latents / 20


def forward_of(model: LinearModel) -> Forward:
    return TrackReplay(cast(Any, model), stacked=True, policy_context=lambda policy: nullcontext())


def make(**settings: Any) -> Draft:
    target = PixelTargetReward(PixelTargetConfig(color=[TARGET] * 3), device="cpu")
    return build(
        DraftConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": WEIGHT},
        train=TrainConfig(),
        seed=3,
        score=MediaScore(rewards={"target": target}, weights={"target": WEIGHT}, kind="image"),
    )


def make_track(rows: int = 3) -> Track:
    """Euler steps from noise."""
    ids = tuple(f"r0/p{row}/0" for row in range(rows))
    latents = [noise(seed=0, rollout=0, ids=ids, step=0, shape=(3, 2, 2))]
    for dt in SIGMAS.diff():
        latents.append(latents[-1] * (1 + float(dt) * W))
    return Track(
        name="image",
        sample_ids=ids,
        group_ids=ids,
        inputs=Inputs.of_texts(("",) * rows),
        metadata=({},) * rows,
        conditions={"positive": Conditions(values={"text": torch.zeros(1, 1)}, index=torch.zeros(rows).long())},
        segment=LatentSegment(
            latents=torch.stack(latents, dim=1),
            positions=torch.arange(STEPS + 1).repeat(rows, 1),
            sde_steps=torch.zeros(rows, 0, dtype=torch.int64),
            sigmas=SIGMAS,
            sampler=Sampler(kernel="euler", eta=0.0),
        ),
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


def loss_of(algorithm: Draft, track: Track, model: LinearModel, *, progress: float = 0.0) -> tuple[Tensor, Losses]:
    losses = algorithm.loss(track, forward_of(model), progress=progress)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))), losses


def slope_of(algorithm: Draft, track: Track, *, progress: float = 0.0) -> float:
    model = LinearModel()
    return torch.autograd.grad(loss_of(algorithm, track, model, progress=progress)[0], model.w)[0].item()


def expected_slope(latents: Tensor, derivative: Tensor) -> float:
    """Of -R = WEIGHT mean (image - TARGET)^2, given d latents / d w."""
    return float(WEIGHT * (2 * (image_of(latents.double()) - TARGET) * derivative.double() / 20).mean())


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_gradient_of_the_last_steps_is_that_of_their_product(steps: int, checkpointing: bool) -> None:
    """x_T = x_first prod(1 + dt w), so d x_T / d w = x_T sum(dt / (1 + dt w))."""
    track, dt = make_track(), SIGMAS.diff()[-steps:].double()
    final = track.latent.final
    slope = slope_of(make(gradient_steps=steps, checkpointing=checkpointing), track)
    assert slope == pytest.approx(expected_slope(final, final.double() * (dt / (1 + dt * W)).sum()), **CLOSE)


def test_the_loss_is_the_negative_weighted_reward_of_the_rollout_itself() -> None:
    track = make_track()
    loss, losses = loss_of(make(gradient_steps=2), track, LinearModel())
    assert float(loss.detach()) == pytest.approx(
        WEIGHT * float(((image_of(track.latent.final) - TARGET) ** 2).mean()), **CLOSE
    )
    # A step of Euler has two roundings, of latents below 8.
    assert losses.metrics["latent_mismatch_max"].total <= 2 * 2 * 2**-24 * 8


def test_refl_jumps_from_a_step_that_training_steps_draw_evenly() -> None:
    """x0 = x_k - sigma_k w x_k at one k for all samples, so d x0 / d w = -sigma_k x_k."""
    track, algorithm = make_track(), make(stop_window=STEPS)
    expected = [
        expected_slope(x * (1 - float(sigma) * W), -sigma.double() * x.double())
        for x, sigma in zip(track.latent.latents.unbind(1), SIGMAS[:-1], strict=False)
    ]
    slopes = [slope_of(algorithm, track, progress=step / 199) for step in range(200)]
    drawn = [[slope == pytest.approx(each, **CLOSE) for each in expected] for slope in slopes]
    assert all(sum(row) == 1 for row in drawn)
    counts = [sum(row[step] for row in drawn) for step in range(STEPS)]
    # Binomial with 200 draws of 1 in 4: a standard deviation of 6.1, and 5 of them.
    assert all(abs(count - 50) < 31 for count in counts), counts
    assert slope_of(algorithm, track.select([0, 1, 2]), progress=0.5) == slope_of(algorithm, track, progress=0.5)


@pytest.mark.parametrize("draws", [1, 3])
def test_noise_draws_average_the_gradient_of_one_step_from_noised_copies(draws: int) -> None:
    """DRaFT-LV: x = (1 - s) x0 + s e and x0' = x - s w x, so d x0' / d w = -s x."""
    track, sigma = make_track(), float(SIGMAS[-2])
    final = track.latent.final
    drawn = forward_noise(seed=3, ids=track.sample_ids, draws=draws, shape=final.shape[1:])
    x = ((1 - sigma) * final[:, None] + sigma * drawn).double()
    slope = slope_of(make(noise_draws=draws), track)
    assert slope == pytest.approx(expected_slope(x * (1 - sigma * W), -sigma * x), **CLOSE)


def test_samples_beyond_the_reward_limit_have_no_gradient() -> None:
    track = make_track()
    rewards = -WEIGHT * ((image_of(track.latent.final) - TARGET) ** 2).flatten(1).mean(dim=1)
    limit = float(rewards.sort().values[1])  # the middle one of three
    model = LinearModel()
    loss, _ = loss_of(make(reward_limit=limit), track, model)
    assert float(loss.detach()) == pytest.approx(float((limit - rewards).clamp(min=0).mean()), **CLOSE)
    assert slope_of(make(reward_limit=float(rewards.min()) - 0.1), track) == 0.0
    lowest = int(rewards.argmin())
    alone = slope_of(make(), track.select([lowest]))
    assert slope_of(make(reward_limit=limit - 1e-6), track) == pytest.approx(alone / 3, **CLOSE)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["reward.shapes.weight=1"], "reward.shapes: algorithm 'draft' needs 'reward-differentiable'"),
        (["algorithm.gradient_steps=11"], "algorithm.gradient_steps: got 11 with stop_window=1"),
        (["algorithm.gradient_steps=8", "algorithm.stop_window=4"], "algorithm.gradient_steps: got 8 with stop_window"),
        (["algorithm.noise_draws=2"], "algorithm.gradient_steps: got 3 with noise_draws=2, expected 1"),
        (
            ["algorithm.noise_draws=2", "algorithm.gradient_steps=1", "sampling.kernel=ddim-eta"],
            "algorithm.noise_draws: got kernel ddim-eta",
        ),
        (["reward.soft.weight=0"], "reward: every reward has weight 0"),
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
    for overrides in ([], stochastic, ["algorithm=refl", "algorithm.gradient_steps=1"]):
        assert match(compose("quickstart-draft", overrides, catalog=catalog), catalog=catalog).accepted, overrides
