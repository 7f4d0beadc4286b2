"""PPO: advantages against golden numbers, NumPy and ranks; losses against a NumPy reference; the critic's own steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from clip_vectors import CLIPS
from ppo_toy import Anchored, Bench, make
from token_algorithms.given import GivenReplay, random_inputs, reduced, track_of
from unirl.algorithms.ppo.config import PpoConfig
from unirl.algorithms.ppo.reference import generalized_advantages, loss
from unirl.conformance.reference import TokenLossInputs
from unirl.core.errors import BatchError, RunFailed
from unirl.core.types.track import Track
from unirl.numerics.tokens.replay import per_token, token_mask


def test_it_is_an_algorithm_with_a_critic_and_a_coefficient() -> None:
    assert make().trains_critic and make(kl_coef=0.1, kl_target=0.1).state() == {"kl_coef": 0.1}


def test_advantages_meet_the_golden_numbers() -> None:
    """Reward 1 at the last of three tokens, values .2, .4, .6, no discount, lambda .95."""
    track = Bench(lengths=(3,)).track
    ones = torch.ones(3, dtype=torch.bool)
    segment = dataclasses.replace(track.text, values=(torch.tensor([0.2, 0.4, 0.6]),), mask=(ones,))
    track = dataclasses.replace(track, segment=segment, rewards=torch.ones(1))
    result, numbers = make(whiten_advantages=False).after_anchor(track, lambda x: x)
    # Values are fp32.
    torch.testing.assert_close(result.text.advantages[0], torch.tensor([0.751, 0.58, 0.4]), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.text.returns[0], torch.tensor([0.951, 0.98, 1.0]), rtol=0, atol=1e-6)
    assert numbers["returns_mean"].total == pytest.approx(0.951 + 0.98 + 1.0, abs=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_are_those_of_numpy_whitened_over_all_tokens(bench: Bench, kl_coef: float) -> None:
    """Rewards by hand, the double sum of the paper text by text, and one mean and Bessel's variance over all tokens."""
    config = PpoConfig(gamma=0.97, gae_lambda=0.8, kl_coef=kl_coef)
    result, numbers = bench.anchored(make(config))
    segment = result.text
    advantages: list[float] = []
    returns: list[float] = []
    kept: list[torch.Tensor] = []
    for row in range(result.num_rows):
        tokens = segment.mask[row]
        rewards = torch.zeros(int(tokens.sum()), dtype=torch.float64)
        rewards[-1] = result.rewards[row]
        if kl_coef:
            rewards -= kl_coef * (segment.log_probs[row] - segment.reference_log_probs[row])[tokens]
        values = segment.values[row][tokens].double()
        one, other = generalized_advantages(rewards.tolist(), values.tolist(), gamma=0.97, lam=0.8)
        advantages, returns = advantages + one, returns + other
        kept.append(tokens)
    plain = np.array(advantages)
    expected = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
    mine = torch.cat([values[tokens] for values, tokens in zip(segment.advantages, kept, strict=True)])
    wanted = torch.cat([values[tokens] for values, tokens in zip(segment.returns, kept, strict=True)])
    # Values, rewards and results are fp32, of order 1.
    np.testing.assert_allclose(mine.numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(wanted.numpy(), returns, rtol=0, atol=1e-6)
    explained = 1 - plain.var() / np.array(returns).var()
    assert numbers["explained_variance"].total == pytest.approx(explained, rel=1e-6)
    assert ("kl" in numbers) == bool(kl_coef)


def test_ranks_whiten_together(bench: Bench) -> None:
    """Two halves, each with the sums of both, have the advantages of the whole; padding counts nowhere."""
    algorithm = make()
    whole = bench.anchored(algorithm)[0]
    halves = [bench.track.select([0, 3]).padded(3), bench.track.select([1, 2, 4, 5])]
    sums: list[torch.Tensor] = []
    for half in halves:
        bench.anchored(algorithm, half, lambda x: sums.append(x) or x)
    for half, rows in zip(halves, ([0, 3], [1, 2, 4, 5]), strict=True):
        result, numbers = bench.anchored(algorithm, half, lambda x: sums[0] + sums[1])
        for place, row in enumerate(rows):
            # The sums are fp64 in another order; advantages are fp32.
            torch.testing.assert_close(result.text.advantages[place], whole.text.advantages[row], rtol=0, atol=1e-6)
        assert numbers["explained_variance"].total == pytest.approx(
            bench.anchored(algorithm)[1]["explained_variance"].total, abs=1e-12
        )


def test_returns_without_spread_have_no_explained_variance(bench: Bench) -> None:
    """With lambda 1 and no discount every return is the reward of its text."""
    even = dataclasses.replace(bench.track, rewards=torch.full((6,), 0.3))
    assert bench.anchored(make(gae_lambda=1.0), even)[1]["explained_variance"].weight == 0


@CLIPS
def test_policy_losses_meet_the_golden_vectors(
    log_ratio: float, advantage: float, settings: dict[str, Any], expected: float
) -> None:
    """One token whose value is right, so that the critic's loss is 0."""
    one = np.ones((1, 1))
    given = TokenLossInputs(
        log_probs=one * log_ratio, old_log_probs=one * 0, entropy=one * 0, valid=one > 0, advantages=one * advantage,
        values=one, old_values=one, returns=one, weights=np.ones(1), is_truncated=np.zeros(1, dtype=bool),
    )  # fmt: skip
    config = PpoConfig(**settings)
    assert loss(config, given) == pytest.approx(expected, abs=1e-10)
    assert loss_of_the_algorithm(config, given) == pytest.approx(expected, abs=1e-10)


SETTINGS: dict[str, tuple[Any, ...]] = {
    "aggregation": (("token-mean", None), ("seq-mean-token-mean", None), ("seq-mean-token-sum-norm", 9.0)),
    "kl": ((0.0, True, "k1"), (0.04, True, "k1"), (0.04, False, "k2"), (0.04, False, "k3")),
    "entropy_coef": (0.0, 0.01),
    "tis": ("none", "token", "sequence"),
    "truncated": ("keep", "mask"),
    "clip_range_value": (None, 0.1),
}


def test_the_algorithm_agrees_with_its_reference_under_every_setting() -> None:
    given = judged_inputs()
    for chosen in itertools.product(*SETTINGS.values()):
        settings = dict(zip(SETTINGS, chosen, strict=True))
        aggregation, horizon = settings.pop("aggregation")
        kl_coef, kl_in_reward, kl_estimator = settings.pop("kl")
        config = PpoConfig(
            clip_range=0.05, clip_range_high=0.08, dual_clip=1.1, tis_cap=1.05, value_coef=0.7, horizon=horizon,
            aggregation=aggregation, kl_coef=kl_coef, kl_in_reward=kl_in_reward, kl_estimator=kl_estimator, **settings,
        )  # fmt: skip
        # Losses are fp64 and of order 1, weights of tokens fp32: 6e-8 each.
        assert loss_of_the_algorithm(config, given) == pytest.approx(loss(config, given), rel=1e-6, abs=1e-6), config


def test_no_split_or_packing_changes_a_gradient(bench: Bench) -> None:
    """After the weights moved, so that clips of the policy and of the critic bind."""
    algorithm = make(entropy_coef=0.05, kl_coef=0.1, kl_in_reward=False, kl_estimator="k3", clip_range_value=0.05)
    track = bench.anchored(algorithm)[0]
    fixed = Anchored(algorithm)
    fixed.before = track
    bench.move()
    numbers = bench.train(fixed, track)
    policy, critic = bench.gradient, bench.critic.gradient
    assert float(policy.norm()) > 0.01 and float(critic.norm()) > 0.01
    assert 0 < numbers["clip_fraction"] < 1 and 0 < numbers["value_clip_fraction"] < 1
    for how in ({"micro_batch_size": 1}, {"micro_batch_size": 4}, {"micro_batch_tokens": 9}, {"packing": False}):
        again = bench.train(fixed, track, **how)
        # Sums of fp32 weights times fp64 numbers of order 1.
        torch.testing.assert_close(bench.gradient, policy, rtol=0, atol=1e-6)
        torch.testing.assert_close(bench.critic.gradient, critic, rtol=0, atol=1e-6)
        for name in ("loss", "critic_loss", "value_loss", "value_clip_fraction"):
            assert again[name] == pytest.approx(numbers[name], abs=1e-6), (how, name)


def test_splits_do_not_change_the_advantages_either(bench: Bench) -> None:
    """From the rollout on, with two updates: values of micro-batches, one whitening."""
    result: list[tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = []
    for micro_batch_size in (0, 1):
        numbers = bench.train(make(), micro_batch_size=micro_batch_size, updates_per_step=2)
        result.append((bench.gradient, bench.critic.gradient, numbers))
    torch.testing.assert_close(result[0][0], result[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(result[0][1], result[1][1], rtol=0, atol=1e-6)
    for name in ("explained_variance", "returns_mean", "advantage_abs_mean"):
        assert result[0][2][name] == pytest.approx(result[1][2][name], abs=1e-6)
    assert result[0][2]["ratio_max_dev_first"] == 0.0 and result[0][2]["critic_updates"] == 2.0


def test_each_loss_trains_its_own_weights_alone(bench: Bench) -> None:
    """The critic's gradient is that of its loss by autograd; no weight of the policy is in it."""
    numbers = bench.train(make(clip_range_value=None))
    track = bench.anchored(make())[0]
    valid = token_mask(track.text)
    values = bench.critic.values(track)
    expected = 0.5 * 0.5 * (values - per_token(track.text, "returns"))[valid].square().mean()
    gradient = torch.autograd.grad(expected, bench.critic.weights)
    torch.testing.assert_close(
        bench.critic.gradient, torch.cat([value.flatten() for value in gradient]), rtol=0, atol=1e-6
    )
    assert numbers["critic_grad_norm"] == pytest.approx(float(bench.critic.gradient.norm()))
    assert numbers["grad_norm"] == pytest.approx(float(bench.gradient.norm()))


def test_the_critic_takes_its_steps_per_update_each_with_the_gradient_at_its_own_weights() -> None:
    """Three steps of descent on the same returns, by autograd of the loss without a clip."""
    bench, alone = Bench(lr=0.05), Bench(lr=0.05).critic
    algorithm = make(clip_range_value=None)
    fixed = Anchored(algorithm)
    fixed.before, _ = bench.anchored(algorithm)
    bench.critic.steps_per_update = 3
    numbers = bench.train(fixed, fixed.before)
    assert (numbers["updates"], numbers["critic_updates"], bench.critic.num_steps) == (1, 3, 3)
    valid, returns = token_mask(fixed.before.text), per_token(fixed.before.text, "returns")
    for _ in range(3):
        alone.zero_grad()
        alone.backward(0.5 * 0.5 * (alone.values(fixed.before) - returns)[valid].square().mean(), last=True)
        alone.step()
    for mine, expected in zip(bench.critic.weights, alone.weights, strict=True):
        # Sums of some thirty fp32 products in another order, thrice.
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_while_the_critic_warms_up_the_policy_waits() -> None:
    bench = Bench(lr=0.1)
    before = [value.detach().clone() for value in bench.weights]
    bench.critic.is_alone = True
    numbers = bench.train(make(), updates_per_step=2)
    assert numbers["updates"] == 0 and numbers["critic_updates"] == 2 and bench.num_steps == 0
    assert all(torch.equal(value, start) for value, start in zip(bench.weights, before, strict=True))
    assert "grad_norm" not in numbers and numbers["critic_grad_norm"] > 0 and "explained_variance" in numbers


def test_the_critic_learns_what_is_there_to_learn() -> None:
    """Rewards that depend on the first token alone, which the critic sees before the second: 60 steps explain most."""
    bench = Bench(lengths=(2,) * 12, lr=1.0)
    firsts = torch.tensor([float(tokens[0]) for tokens in bench.track.text.tokens])
    segment = dataclasses.replace(bench.track.text, mask=(torch.tensor([False, True]),) * 12)
    track = dataclasses.replace(bench.track, segment=segment, rewards=(firsts - firsts.mean()) / firsts.std())
    bench.critic.is_alone = True
    explained = [bench.train(make(clip_range_value=None), track)["explained_variance"] for _ in range(60)]
    assert explained[0] < 0.3 < 0.9 < explained[-1]


def test_a_critic_without_its_algorithm_and_the_other_way_round_are_refused(bench: Bench) -> None:
    class Plain:
        """An algorithm without a critic."""

        trains_critic = False
        trains_fake_score = False
        separates_steps = False

        def __init__(self) -> None:
            other = make()
            self.advantages, self.with_old_log_probs, self.loss_weights, self.loss = (
                other.advantages, other.with_old_log_probs, other.loss_weights, other.loss
            )  # fmt: skip

    with pytest.raises(BatchError, match=r"Ppo trains a critic, and the backend keeps none; .* backend\.critic\.lr"):
        bench.train(make(), critic=None)
    with pytest.raises(BatchError, match=r"keeps a critic, and Plain trains none; .* backend\.critic\.lr=null"):
        bench.train(Plain())  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_names_its_sample_and_token(bench: Bench, bad: float) -> None:
    """Whitening would spread it over every advantage of the batch. The third token of a text is not trained on."""
    plain = bench.critic.values

    def broken(track: Track, *, token: int = 3) -> torch.Tensor:
        values = plain(track).clone()
        values[[sample == "p1/3" for sample in track.sample_ids], token] = bad
        return values

    bench.critic.values = broken  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=rf"critic: .* is {bad} before token 3 of sample 'p1/3' of track 'text'"):
        bench.train(make(), micro_batch_size=2)
    assert bench.num_steps == 0 and bench.critic.num_steps == 0
    bench.critic.values = lambda track: broken(track, token=2)  # type: ignore[method-assign]
    assert bench.train(make(), micro_batch_size=3)["critic_updates"] == 1
    padded = dataclasses.replace(bench.track, sample_weights=torch.tensor([1.0, 1, 1, 0, 1, 1]))
    bench.critic.values = broken  # type: ignore[method-assign]
    assert bench.train(make(), padded)["critic_updates"] == 1


def test_a_value_that_is_not_finite_on_another_rank_stops_this_one_too(bench: Bench) -> None:
    # A single number is joined for the values alone: the sizes of the ranks are two.
    bench.all_reduce_max = lambda values: values + (values.numel() == 1)  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="critic: a value on another rank is not finite"):
        bench.train(make())


def test_a_step_without_a_row_that_counts_takes_no_step(bench: Bench) -> None:
    track = dataclasses.replace(bench.track, sample_weights=torch.zeros(6))
    numbers = bench.train(make(), track)
    assert numbers["updates"] == 0 and numbers["critic_updates"] == 0


def test_a_divergence_in_the_reward_runs_the_reference_once_and_adapts(bench: Bench) -> None:
    """In the old-log-prob pass alone; `kl` above its target raises the coefficient by 1 + 2/10 x 0.2."""
    asked: list[str] = []
    replay = bench.replay()

    def noting(track: Track, *, policy: Any = "live") -> Any:
        asked.append(policy)
        return replay(track, policy=policy)

    algorithm = make(kl_coef=0.5, kl_estimator="k3", kl_target=1e-6, kl_horizon=10.0)
    track = algorithm.with_old_log_probs(bench.track, noting)
    assert asked == ["live", "reference"] and set(algorithm.loss_weights(track)) == {"policy"}
    numbers = bench.train(algorithm)
    assert numbers["kl"] > 1e-5
    assert algorithm.end_step({**numbers, "samples": 2.0}) == {"kl_coef": 0.5}
    assert algorithm.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 0.2))


def judged_inputs() -> TokenLossInputs:
    """With values, and what they are compared with, in fp32, as the phases before give them."""
    shape = (7, 9)
    rng = np.random.default_rng(4)
    names = ("values", "old_values", "returns", "advantages")
    return random_inputs(**{name: rng.normal(0, 0.3, shape).astype(np.float32).astype(np.float64) for name in names})


def loss_of_the_algorithm(config: PpoConfig, given: TokenLossInputs) -> float:
    """Both losses, from a track that holds these numbers."""
    algorithm, track = make(config), track_of(given)
    policy = reduced(algorithm.loss(track, GivenReplay(given), progress=0.0), algorithm.loss_weights(track))
    critic = algorithm.critic_loss(track, torch.tensor(given.values), progress=0.0)
    total = policy + reduced(critic, algorithm.critic_weights(track))
    assert math.isfinite(total)
    return total
