"""DPOK: golden vectors, the clip without a maximum, the penalty's identity for every kernel, and its critic."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unirl.algorithms.dpok.algorithm import CriticDpok, Dpok, build
from unirl.algorithms.dpok.config import DpokConfig
from unirl.algorithms.dpok.reference import loss
from unirl.conformance.reference import LossInputs
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Replayed
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.losses import gaussian_kl
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.train.steps import velocity_gain, velocity_shift_squared

OLD = (-1.0, -1.0002, -0.9999, -1.00005)
NEW = (-0.99985, -1.00025, -1.0001, -1.00004)
ADVANTAGES = (1.5, -0.7, 5.0, -2.0)
SEGMENT = ("sde_steps", "sigmas", "sampler", "values", "returns")
"""Fields of a track that belong to its segment."""


def make(**settings: Any) -> Dpok:
    config = DpokConfig(**{"kl_coef": 0.0, "reward_weight": 1.0, **settings})
    advantage = AdvantageConfig(normalize=False)
    return build(config, advantage=advantage, reward_weights={"one": 1.0}, train=TrainConfig(), seed=0)


def make_track(log_probs: Tensor, **fields: Any) -> Track:
    rows, steps = log_probs.shape
    segment = {
        "latents": torch.zeros(rows, steps + 1, 2),
        "positions": torch.arange(steps + 1).repeat(rows, 1),
        "sde_steps": torch.arange(steps).repeat(rows, 1),
        "log_probs": log_probs,
        "sigmas": torch.linspace(1, 0, steps + 2),
        "sampler": Sampler(kernel="flow-sde", eta=0.7),
    }
    segment |= {key: fields.pop(key) for key in SEGMENT if key in fields}
    return Track(
        **{
            "name": "image",
            "sample_ids": tuple(f"p/{row}" for row in range(rows)),
            "group_ids": ("p",) * rows,
            "inputs": Inputs.of_texts(("p",) * rows),
            "metadata": ({},) * rows,
            "segment": LatentSegment(**segment),
            "sample_weights": torch.ones(rows),
            "status": (Status.COMPLETED,) * rows,
            "policy_version": (0,) * rows,
            **fields,
        }
    )


class Given:
    """Replays what it was given, in place of a model."""

    def __init__(self, log_probs: Tensor, *, means: Tensor | None = None, reference: Tensor | None = None) -> None:
        zeros = torch.zeros(*log_probs.shape, 2, dtype=log_probs.dtype)
        self._means = {
            "live": zeros if means is None else means,
            "reference": zeros if reference is None else reference,
        }
        self._log_probs = log_probs

    def __call__(self, track: Track, *, policy: str = "live") -> Replayed:
        ones = torch.ones(*self._log_probs.shape, 1)
        return Replayed(
            log_probs=self._log_probs, means=self._means[policy], std=ones, g=ones, next=self._means["live"],
            valid=track.latent.scored_steps >= 0,
        )  # fmt: skip


def loss_of(algorithm: Dpok, track: Track, forward: Any) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


def golden() -> tuple[Track, Given]:
    track = make_track(torch.tensor(OLD, dtype=torch.float64)[:, None])
    track = dataclasses.replace(track, advantages=torch.tensor(ADVANTAGES, dtype=torch.float64))
    return track, Given(torch.tensor(NEW, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("weight", [1.0, 100.0])
def test_the_loss_of_the_golden_log_probs_clips_in_both_directions(weight: float) -> None:
    """The ratios of Flow-GRPO's golden vector, clipped to 1 +- 1e-4 without the maximum: the first and the third are
    outside, and PPO would keep the third, whose ratio fell at a positive advantage."""
    ratios = [1.0001, 0.99995000125, 0.9999, 1.00001000005]
    expected = -sum(advantage * ratio for advantage, ratio in zip(ADVANTAGES, ratios, strict=True)) / 4
    # The ratios have 12 digits.
    assert float(loss_of(make(reward_weight=weight), *golden())) == pytest.approx(weight * expected, rel=1e-11)
    losses = make().loss(*golden(), progress=0.0)
    assert losses.metrics["clip_fraction"].total == 2.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.3, -0.05, 0.05, 0.3])
def test_a_ratio_outside_the_clip_has_no_gradient_whatever_the_sign_of_its_advantage(
    log_ratio: float, advantage: float
) -> None:
    new = torch.full((1, 1), log_ratio, dtype=torch.float64, requires_grad=True)
    track = dataclasses.replace(make_track(torch.zeros(1, 1)), advantages=torch.tensor([advantage]))
    loss_of(make(clip_range=0.2, reward_weight=3.0), track, Given(new)).backward()
    assert new.grad is not None
    expected = 0.0 if abs(log_ratio) > 0.2 else -3.0 * advantage * math.exp(log_ratio)
    # One exponential in fp64.
    assert float(new.grad) == pytest.approx(expected, rel=1e-14)


KERNELS = {
    "flow-sde": (0.7, (), [1.0, 0.9, 0.75, 2 / 3, 0.4]),
    "dance-sde": (0.3, (), [1.0, 0.9, 0.75, 2 / 3, 0.4]),
    "cps": (0.8, (("constants", True),), [1.0, 0.9, 0.75, 2 / 3, 0.4]),
    "ddim-eta": (1.0, (("prediction", "epsilon"),), []),
}


def ddim_sigmas() -> tuple[list[float], list[float]]:
    """abar at t = 601 and 581 of the scaled-linear schedule from .00085 to .012, and sqrt((1 - abar) / abar)."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=np.float64) ** 2
    bars = np.cumprod(1 - betas)[[601, 581]]
    return bars.tolist(), np.sqrt((1 - bars) / bars).tolist()


def gains(kernel: str, eta: float, sigmas: list[float]) -> list[tuple[float, float]]:
    """(c, s) of each step but the last, by the formulas of the papers in fp64."""
    result: list[tuple[float, float]] = []
    for number, (sigma, after) in enumerate(itertools.pairwise(sigmas)):
        if kernel == "cps":  # arXiv 2509.05952: (1 - s') x0 + sqrt(s'^2 - std^2) x1
            std = after * math.sin(eta * math.pi / 2)
            gain = -(1 - after) * sigma + math.sqrt(after**2 - std**2) * (1 - sigma)
        else:
            g = eta if kernel == "dance-sde" else eta * math.sqrt(sigma / (1 - (sigmas[1] if number == 0 else sigma)))
            std = g * math.sqrt(sigma - after)
            gain = (after - sigma) * (1 + g**2 * (1 - sigma) / (2 * sigma))
        result.append((gain, std))
    return result[:-1]


@pytest.mark.parametrize("kernel", ["flow-sde", "dance-sde", "cps"])
def test_the_penalty_is_the_gaussian_kl_over_c_squared_by_two_s_squared(kernel: str) -> None:
    """Section 4.2 of the paper bounds the KL of the samples by the sum of the KLs of the steps, c^2 / (2 s^2) times
    the squared velocity distance each."""
    eta, options, sigmas = KERNELS[kernel]
    expected = gains(kernel, eta, sigmas)
    track = make_track(
        torch.zeros(2, 3), sigmas=torch.tensor(sigmas), sampler=Sampler(kernel=kernel, eta=eta, options=options)
    )
    gain = torch.tensor([c for c, _ in expected], dtype=torch.float64)
    std = torch.tensor([s for _, s in expected], dtype=torch.float64)[None, :, None].expand(2, -1, -1)
    # Coefficients of order 0.1 as differences of fp32 numbers of order 1.
    torch.testing.assert_close(velocity_gain(track.latent).double(), gain.expand(2, -1), rtol=3e-6, atol=0)
    random = torch.Generator().manual_seed(0)
    shift = torch.randn(2, 3, 2, generator=random, dtype=torch.float64)
    means = torch.randn(2, 3, 2, generator=random, dtype=torch.float64)
    new, other = (Given(torch.zeros(2, 3), means=each)(track) for each in (means + gain[:, None] * shift, means))
    penalty = velocity_shift_squared(track.latent, new, other)
    torch.testing.assert_close(penalty.double(), shift.square().mean(2), rtol=1e-5, atol=0)
    kl = gaussian_kl(new.means, other.means, std)
    torch.testing.assert_close(kl, gain.square() / (2 * std[..., 0].square()) * penalty.double(), rtol=1e-5, atol=0)


def test_the_factor_of_ddim_is_that_of_the_published_schedule() -> None:
    """From t = 601 to 581 at eta 1, c^2 / (2 s^2) with c = sqrt(1 - abar' - s^2) - sqrt(abar' / abar) sqrt(1 - abar)
    is .0764743."""
    (bar, bar_next), sigmas = ddim_sigmas()
    track = make_track(
        torch.zeros(1, 1), sigmas=torch.tensor([*sigmas, 0.0]),
        sampler=Sampler(kernel="ddim-eta", eta=1.0, options=(("prediction", "epsilon"),)),
    )  # fmt: skip
    variance = (1 - bar_next) / (1 - bar) * (1 - bar / bar_next)
    c = math.sqrt(1 - bar_next - variance) - math.sqrt(bar_next / bar) * math.sqrt(1 - bar)
    assert c**2 / (2 * variance) == pytest.approx(0.0764743, abs=5e-8)
    # c is -0.13, a difference of fp32 numbers of order 1.
    assert float(velocity_gain(track.latent)) == pytest.approx(c, rel=5e-6)


def test_the_penalty_of_rows_without_a_step_is_finite() -> None:
    track = make_track(torch.zeros(2, 2), sde_steps=torch.tensor([[0, 1], [0, -1]]))
    assert bool(velocity_gain(track.latent).isfinite().all()) and float(velocity_gain(track.latent)[1, 1]) == 1.0


def test_group_advantages_are_rewards_less_their_mean() -> None:
    track = make_track(torch.zeros(4, 1))
    rewards = torch.tensor([0.0, 1.0, 1.0, 4.0])
    track = dataclasses.replace(track, rewards=rewards, reward_parts={"one": rewards})
    result, _ = make().advantages(track)
    torch.testing.assert_close(result.advantages, rewards - 1.5, rtol=0, atol=0)
    assert not make().trains_critic


def judged(**fields: Any) -> tuple[CriticDpok, Track]:
    algorithm = make(critic=True)
    assert isinstance(algorithm, CriticDpok) and algorithm.trains_critic
    track = make_track(
        torch.zeros(3, 2),
        sde_steps=torch.tensor([[0, 1], [0, -1], [0, 1]]),
        values=torch.tensor([[0.25, 0.5], [1.0, math.nan], [math.nan, math.nan]]),
        rewards=torch.tensor([1.0, 0.5, math.nan]),
        sample_weights=torch.tensor([1.0, 1.0, 0.0]),
        **fields,
    )
    return algorithm, track


def test_with_a_critic_an_advantage_is_the_reward_less_the_value_of_its_step() -> None:
    algorithm, track = judged()
    result, metrics = algorithm.after_anchor(track, lambda sums: sums)
    # Numbers that fp32 holds exactly; empty slots and rows of weight 0 are 0 and count nowhere.
    assert result.latent.advantages is not None and result.latent.returns is not None
    assert result.latent.advantages.tolist() == [[0.75, 0.5], [-0.5, 0.0], [0.0, 0.0]]
    assert result.latent.returns.tolist() == [[1.0, 1.0], [0.5, 0.0], [0.0, 0.0]]
    assert metrics["values_mean"].total == 1.75 and metrics["values_mean"].weight == 3.0
    errors, returns = np.array([0.75, 0.5, -0.5]), np.array([1.0, 1.0, 0.5])
    assert metrics["explained_variance"].total == pytest.approx(1 - errors.var() / returns.var(), rel=1e-12)


def test_the_value_loss_is_half_the_squared_error_of_the_counted_steps() -> None:
    algorithm, track = judged(returns=torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, 0.0]]))
    values = torch.tensor([[0.5, 2.0], [0.0, 9.0], [9.0, 9.0]], requires_grad=True)
    losses = algorithm.critic_loss(track, values, progress=0.0)
    total = reduce_terms(losses.terms, totals=weight_totals(algorithm.critic_weights(track)))
    assert float(total.detach()) == pytest.approx((0.25 + 1.0 + 0.25) / 2 / 3, rel=1e-6)
    total.backward()
    assert values.grad is not None
    # (V - R) / 3, in fp32.
    expected = torch.tensor([[-0.5, 1.0], [-0.5, 0.0], [0.0, 0.0]]) / 3
    torch.testing.assert_close(values.grad, expected, rtol=1e-6, atol=0)


def test_the_algorithm_agrees_with_its_reference_under_every_setting() -> None:
    random = np.random.default_rng(3)
    rows, steps = 5, 2
    given = LossInputs(
        log_probs=random.normal(0, 0.1, (rows, steps)), old_log_probs=random.normal(0, 0.1, (rows, steps)),
        means=random.normal(size=(rows, steps, 2)), reference_means=random.normal(size=(rows, steps, 2)),
        old_means=np.zeros((rows, steps, 2)), std=np.ones((rows, steps)), sigmas=np.array([1.0, 0.75, 0.5, 0.0]),
        g=np.array([[0.7 * math.sqrt(1 / 0.25), 0.7 * math.sqrt(3)]] * rows),
        sde_steps=np.array([[0, 1]] * 4 + [[1, -1]]), advantages=random.normal(size=rows),
        weights=np.array([1.0, 1.0, 0.0, 2.0, 1.0]), progress=0.0, rewards=random.normal(size=rows),
        values=random.normal(size=(rows, steps)), old_values=random.normal(size=(rows, steps)),
        kl_weights=np.array([0.0, 1.0, 1.0, 0.5, 1.0]),
    )  # fmt: skip
    # In the last row the first column holds step 1.
    given.g[4, 0] = 0.7 * math.sqrt(3)
    for clip, weight, kl, critic in itertools.product((0.05, 0.2), (1.0, 100.0), (0.0, 0.3), (False, True)):
        settings = {"clip_range": clip, "reward_weight": weight, "kl_coef": kl, "critic": critic}
        algorithm = make(**settings)
        track = make_track(
            torch.tensor(given.old_log_probs), sde_steps=torch.tensor(given.sde_steps),
            sigmas=torch.tensor(given.sigmas).float(), values=torch.tensor(given.old_values),
            advantages=torch.tensor(given.advantages), rewards=torch.tensor(given.rewards),
            sample_weights=torch.tensor(given.weights), kl_weights=torch.tensor(given.kl_weights),
        )  # fmt: skip
        forward = Given(
            torch.tensor(given.log_probs), means=torch.tensor(given.means),
            reference=torch.tensor(given.reference_means),
        )  # fmt: skip
        result = 0.0
        if isinstance(algorithm, CriticDpok):
            track, _ = algorithm.after_anchor(track, lambda sums: sums)
            own = algorithm.critic_loss(track, torch.tensor(given.values), progress=0.0)
            result = float(reduce_terms(own.terms, totals=weight_totals(algorithm.critic_weights(track))))
        result += float(loss_of(algorithm, track, forward))
        # Rewards and coefficients of a step pass through fp32.
        expected = loss(DpokConfig(**settings), given)
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-6 * weight), settings


def reasons(recipe: str, *overrides: str) -> list[str]:
    catalog = Catalog.discover()
    verdict = match(compose(recipe, overrides, catalog=catalog), catalog=catalog)
    return [str(reason) for reason in verdict.reasons]


def test_its_recipes_match() -> None:
    assert reasons("quickstart-dpok") == []
    assert reasons("sd3/dpok", "data.train=prompts.txt") == []
    assert reasons("quickstart-dpok", "algorithm.critic=true", "backend.critic.lr=1e-3") == []
    critic = ("algorithm.critic=true", "backend.critic.lr=1e-4", "advantage.normalize=true")
    assert reasons("sd3/dpok", "data.train=prompts.txt", *critic) == []


CRITIC = ("algorithm.critic=true", "backend.critic.lr=1e-3")


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (("sampling.eta=0",), "sampling.eta", ""),
        (("algorithm.clip_range=0",), "algorithm.clip_range", "expected more than 0 and at most 1"),
        (("algorithm.reward_weight=0",), "algorithm.reward_weight", "expected more than 0"),
        (("algorithm.kl_coef=-1",), "algorithm.kl_coef", "expected 0 or more"),
        (("backend.reference_copy=false",), "backend.reference_copy", "needs a reference policy"),
        (("algorithm.critic=true",), "backend.critic.lr", "got null, but algorithm 'dpok' trains a critic"),
        (("backend.critic.lr=1e-3",), "backend.critic.lr", "does not train a critic"),
        ((*CRITIC, "advantage.clip=3"), "advantage.clip", "come from its critic"),
        (
            (*CRITIC, "+reward@reward.size=jpeg-size", "algorithm.kl_gate=0.1"),
            "algorithm.kl_gate",
            "algorithm 'dpok' does not compare the samples of a group",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(overrides: tuple[str, ...], key: str, says: str) -> None:
    result = reasons("quickstart-dpok", *overrides)
    assert len(result) == 1 and f"{key}:" in result[0] and says in result[0], result
