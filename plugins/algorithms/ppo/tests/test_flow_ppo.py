"""PPO over denoise steps: advantages against golden numbers and identities, losses against a NumPy reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from clip_vectors import CLIPS_WITHOUT_DUAL
from torch import Tensor
from unirl.algorithms.ppo.config import FlowPpoConfig
from unirl.algorithms.ppo.flow_ppo import FlowPpo
from unirl.algorithms.ppo.flow_reference import loss
from unirl.conformance.reference import LossInputs
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Replayed
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

STEPS = torch.tensor([[0, 1, 2], [1, 2, -1], [0, 2, -1], [0, 1, 2]])
"""Scored steps of four samples; -1 is none."""
VALUES = torch.tensor([[0.2, 0.4, 0.6], [0.5, -0.25, math.nan], [1.0, 0.125, math.nan], [math.nan] * 3])
REWARDS = torch.tensor([1.0, -0.5, 2.0, math.nan])
WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 0.0])


def make(config: FlowPpoConfig | None = None, **settings: Any) -> FlowPpo:
    return FlowPpo(config or FlowPpoConfig(**settings), train=TrainConfig())


def make_track(steps: Tensor = STEPS, *, rewards: Tensor = REWARDS, weights: Tensor = WEIGHTS, **fields: Any) -> Track:
    rows = len(steps)
    segment = LatentSegment(
        latents=torch.zeros(rows, 4, 2),
        positions=torch.arange(4).repeat(rows, 1),
        sde_steps=steps,
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
        **fields,
    )
    return Track(
        name="image",
        sample_ids=tuple(f"p/{row}" for row in range(rows)),
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts(("p",) * rows),
        metadata=({},) * rows,
        segment=segment,
        rewards=rewards,
        sample_weights=weights,
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


def judged(algorithm: FlowPpo, track: Track | None = None) -> LatentSegment:
    result, _ = algorithm.after_anchor(track or make_track(values=VALUES), lambda sums: sums)
    return result.latent


class Given:
    """Replays what it was given, in place of a model."""

    def __init__(self, given: LossInputs) -> None:
        self._given = given

    def __call__(self, track: Track, *, policy: str = "live") -> Replayed:
        given = self._given
        means = torch.tensor(given.means if policy == "live" else given.reference_means)
        std = torch.tensor(given.std)[..., None]
        return Replayed(
            log_probs=torch.tensor(given.log_probs), means=means, std=std, g=std, next=means,
            valid=track.latent.scored_steps >= 0,
        )  # fmt: skip


def test_it_is_an_algorithm_with_a_critic_and_a_coefficient() -> None:
    assert make().trains_critic and make(kl_coef=0.1, kl_target=0.1).state() == {"kl_coef": 0.1}


def test_advantages_meet_the_golden_numbers() -> None:
    """Reward 1 at the last of three steps, values .2, .4, .6, no discount, lambda .95."""
    result = judged(make(whiten_advantages=False))
    assert result.advantages is not None and result.returns is not None
    # Values are fp32.
    torch.testing.assert_close(result.advantages[0], torch.tensor([0.751, 0.58, 0.4]), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.returns[0], torch.tensor([0.951, 0.98, 1.0]), rtol=0, atol=1e-6)


def test_lambda_1_gives_the_reward_to_go_and_lambda_0_the_td_error() -> None:
    """With gamma 1: A + V is the reward at every step, A the value after the step less the one before; steps that are
    not scored are not actions, so time goes from one scored step to the next."""
    result = judged(make(whiten_advantages=False, gae_lambda=1.0))
    assert result.advantages is not None and result.returns is not None
    valid = (STEPS >= 0) & (WEIGHTS > 0)[:, None]
    # Sums of two or three fp32 numbers of order 1.
    torch.testing.assert_close(
        (result.advantages + VALUES)[valid], REWARDS[:, None].expand(-1, 3)[valid], rtol=0, atol=1e-6
    )
    assert not bool(result.advantages[~valid].any()) and not bool(result.returns[~valid].any())
    errors = judged(make(whiten_advantages=False, gae_lambda=0.0)).advantages
    assert errors is not None
    expected = torch.tensor([[0.2, 0.2, 0.4], [-0.75, -0.25, 0.0], [-0.875, 1.875, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(errors, expected, rtol=0, atol=1e-6)


def test_advantages_are_whitened_over_the_steps_of_all_ranks() -> None:
    """Two ranks, each with the sums of both, have the advantages of one; mean 0 and Bessel's variance 1 over the
    scored steps."""
    algorithm, track = make(), make_track(values=VALUES)
    whole = judged(algorithm).advantages
    assert whole is not None
    kept = whole[(STEPS >= 0) & (WEIGHTS > 0)[:, None]]
    # Seven fp32 numbers of order 1.
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6) and float(kept.var()) == pytest.approx(1, abs=1e-6)
    halves = [track.select([0, 3]), track.select([1, 2])]
    sums: list[Tensor] = []
    for half in halves:
        algorithm.after_anchor(half, lambda own: sums.append(own) or own)
    for half, rows in zip(halves, ([0, 3], [1, 2]), strict=True):
        result, _ = algorithm.after_anchor(half, lambda own: sums[0] + sums[1])
        assert result.latent.advantages is not None
        torch.testing.assert_close(result.latent.advantages, whole[rows], rtol=0, atol=1e-6)


def inputs() -> LossInputs:
    """The samples above, with the values of now and then in fp32, as the phases before give them."""
    random = np.random.default_rng(5)
    shape = STEPS.shape
    old = VALUES.double().numpy()
    return LossInputs(
        log_probs=random.normal(0, 0.1, shape), old_log_probs=random.normal(0, 0.1, shape),
        means=random.normal(size=(*shape, 2)), old_means=np.zeros((*shape, 2)),
        reference_means=random.normal(size=(*shape, 2)), std=random.uniform(0.2, 0.6, shape), g=np.ones(shape),
        sigmas=np.array([1.0, 0.75, 0.5, 0.25, 0.0]), sde_steps=STEPS.numpy(), weights=WEIGHTS.double().numpy(),
        progress=0.0, rewards=REWARDS.double().numpy(), old_values=old,
        values=(old + random.normal(0, 0.3, shape)).astype(np.float32).astype(np.float64),
    )  # fmt: skip


def loss_of_the_algorithm(config: FlowPpoConfig, given: LossInputs) -> float:
    """Both losses, from a track that holds these numbers."""
    algorithm = make(config)
    track = make_track(
        torch.tensor(given.sde_steps), rewards=torch.tensor(given.rewards), weights=torch.tensor(given.weights),
        values=torch.tensor(given.old_values), log_probs=torch.tensor(given.old_log_probs),
    )  # fmt: skip
    track, _ = algorithm.after_anchor(track, lambda sums: sums)
    policy = algorithm.loss(track, Given(given), progress=0.0)  # type: ignore[arg-type]
    critic = algorithm.critic_loss(track, torch.tensor(given.values), progress=0.0)
    total = reduce_terms(policy.terms, totals=weight_totals(algorithm.loss_weights(track)))
    return float(total + reduce_terms(critic.terms, totals=weight_totals(algorithm.critic_weights(track))))


def test_the_algorithm_agrees_with_its_reference_under_every_setting() -> None:
    given = inputs()
    choices: dict[str, tuple[Any, ...]] = {
        "clip_range_high": (None, 0.1), "clip_range_value": (None, 0.1), "kl_coef": (0.0, 0.04), "gamma": (1.0, 0.9),
        "gae_lambda": (0.0, 0.95), "whiten_advantages": (True, False),
    }  # fmt: skip
    for chosen in itertools.product(*choices.values()):
        config = FlowPpoConfig(clip_range=0.05, value_coef=0.7, **dict(zip(choices, chosen, strict=True)))
        # Rewards are placed in fp32: 6e-8 of order 1 each.
        assert loss_of_the_algorithm(config, given) == pytest.approx(loss(config, given), rel=1e-6, abs=1e-6), config


@CLIPS_WITHOUT_DUAL
def test_policy_losses_meet_the_golden_vectors(
    log_ratio: float, advantage: float, settings: dict[str, Any], expected: float
) -> None:
    """One step whose old value is 0 and whose reward is the advantage; the critic predicts it exactly."""
    one = np.ones((1, 1))
    given = dataclasses.replace(
        inputs(), log_probs=one * log_ratio, old_log_probs=one * 0, means=np.zeros((1, 1, 2)),
        reference_means=np.zeros((1, 1, 2)), std=one, sde_steps=np.ones((1, 1), dtype=np.int64), weights=np.ones(1),
        rewards=np.full(1, advantage), old_values=one * 0, values=one * advantage,
    )  # fmt: skip
    config = FlowPpoConfig(**{"clip_range": 0.2, "clip_range_value": None, "whiten_advantages": False, **settings})
    assert loss(config, given) == pytest.approx(expected, abs=1e-9)
    assert loss_of_the_algorithm(config, given) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "binds"), [(0.3, 1.0, True), (-0.3, -1.0, True), (0.3, -1.0, False), (0.1, 1.0, False)]
)
def test_a_ratio_outside_the_clip_has_no_gradient_where_it_moved_with_its_advantage(
    log_ratio: float, advantage: float, binds: bool
) -> None:
    new = torch.full((1, 1), log_ratio, dtype=torch.float64, requires_grad=True)
    track = make_track(
        torch.zeros(1, 1, dtype=torch.int64), rewards=torch.ones(1), weights=torch.ones(1),
        log_probs=torch.zeros(1, 1), advantages=torch.full((1, 1), advantage),
    )  # fmt: skip
    zero, ones = torch.zeros(1, 1, 2), torch.ones(1, 1, 1)

    def forward(track: Track, *, policy: str = "live") -> Replayed:
        return Replayed(log_probs=new, means=zero, std=ones, g=ones, next=zero, valid=torch.ones(1, 1) > 0)

    losses = make(clip_range=0.2).loss(track, forward, progress=0.0)  # type: ignore[arg-type]
    losses.terms[0].values.sum().backward()
    # One exponential in fp64.
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(0.0 if binds else -advantage * math.exp(log_ratio), rel=1e-14)


def reasons(recipe: str, *overrides: str) -> list[str]:
    catalog = Catalog.discover()
    return [str(reason) for reason in match(compose(recipe, overrides, catalog=catalog), catalog=catalog).reasons]


def test_its_recipes_match_with_any_number_of_samples_a_prompt() -> None:
    assert reasons("quickstart-flow-ppo") == []
    assert reasons("quickstart-flow-ppo", "data.samples_per_prompt=1") == []
    assert reasons("sd3/flow-ppo", "data.train=prompts.txt") == []


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (("backend.critic.lr=null",), "backend.critic.lr", "got null, but algorithm 'flow-ppo' trains a critic"),
        (("backend.critic.steps_per_update=0",), "backend.critic.steps_per_update", "expected 1 or more"),
        (("sampling.eta=0",), "sampling.eta", "takes ratios"),
        (("advantage.scope=global",), "advantage.scope", "the advantages of flow-ppo come from its critic"),
        (("algorithm.gae_lambda=1.5",), "algorithm.gae_lambda", "expected 0 to 1"),
        (("algorithm.value_coef=0",), "algorithm.value_coef", "At 0 no critic learns."),
        (("algorithm.clip_range_value=0",), "algorithm.clip_range_value", "expected more than 0, or null"),
        (("algorithm.clip_range=1.5",), "algorithm.clip_range", "expected more than 0 and at most 1"),
        (("algorithm.kl_coef=0.1",), "backend.reference_copy", "needs a reference policy"),
        (
            (
                "algorithm.kl_coef=0.1", "backend.reference_copy=true", "algorithm.kl_gate=0.1",
                "+reward@reward.size=jpeg-size",
            ),
            "algorithm.kl_gate",
            "algorithm 'flow-ppo' does not compare the samples of a group",
        ),
        (
            (
                "algorithm.kl_coef=0.1", "backend.reference_copy=true", "sampling.kernel=cps",
                "+sampling.kernel_options.constants=false",
            ),
            "sampling.kernel_options.constants",
            "drops the constants",
        ),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_one_sentence(overrides: tuple[str, ...], key: str, says: str) -> None:
    result = reasons("quickstart-flow-ppo", *overrides)
    assert len(result) == 1 and f"{key}:" in result[0] and says in result[0], result
