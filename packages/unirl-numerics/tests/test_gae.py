"""Advantages and returns of tokens, whitening and the critic's loss: golden numbers, NumPy, and identities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.tokens.gae import gae, rewards_to_go, token_rewards
from unirl.numerics.tokens.value_loss import clipped_value_loss, explained_variance
from unirl.numerics.tokens.whitening import token_moments, whiten


def doubles(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_the_golden_numbers():
    result = gae(doubles([0, 0, 1]), doubles([0.2, 0.4, 0.6]), torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.95)
    # Exact decimals, in fp64.
    torch.testing.assert_close(result.advantages, doubles([0.751, 0.58, 0.4]), rtol=0, atol=1e-15)
    torch.testing.assert_close(result.returns, doubles([0.951, 0.98, 1.0]), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("gamma", "lam", "wanted"),
    [
        (0.97, 0.8, ([-0.80880003, -1.05], [0.311399298, 0.030153718, 0.982156847, 0.011800027, 0.3],
                     [1.470528014, 0.452999997, -0.75])),
        (1.0, 0.95, ([-0.997499987, -1.05], [0.562876855, 0.276712483, 1.080749996, 0.084999996, 0.3],
                     [1.445625004, 0.337500009, -0.75])),
    ],
)  # fmt: skip
def test_texts_of_any_length_have_the_advantages_of_torchrl(gamma, lam, wanted):
    """`generalized_advantage_estimate` of TorchRL 0.14.1, a text at a time; here all at once, the last one with a hole."""
    rewards = doubles([0.5, -1.25, 0, 0, 0], [0, 0.25, -0.5, 0, 1], [0.125, 9, 0.75, -0.25, 0])
    values = doubles([0.3, -0.2, 0, 0, 0], [0.1, 0.4, -0.6, 0.9, 0.7], [-0.8, 9, 0.2, 0.5, 0])
    valid = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
    result = gae(rewards, values, valid, gamma=gamma, lam=lam)
    flat = torch.cat([torch.tensor(row, dtype=torch.float64) for row in wanted])
    # It holds gamma and lambda in fp32, which rounds them by 3e-8.
    torch.testing.assert_close(result.advantages[valid], flat, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.returns[valid], flat + values[valid], rtol=0, atol=1e-6)


def test_the_loss_of_a_critic_and_its_gradient_are_half_of_torchrls():
    """`_clip_value_loss` of TorchRL 0.14.1 with `l2`; it has no factor 1/2."""
    now, before = doubles([0.9, -0.4, 0.1, 1.5, 0])[0].requires_grad_(), doubles([0.5, -0.3, 0.2, 0.6, -0.7])[0]
    result = clipped_value_loss(now, before, doubles([0.2, 0.8, 0.1, 2, 0.4])[0], clip=0.2)
    result.loss.sum().backward()
    # Printed to nine decimals.
    torch.testing.assert_close(result.loss, doubles([0.245, 0.72, 0, 0.72, 0.405])[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(now.grad, doubles([0.7, -1.2, 0, 0, 0])[0], rtol=0, atol=1e-9)


def by_definition(rewards, values, *, gamma, lam, bootstrap):
    """The sum over the deltas of one row without padding."""
    following = np.append(values[1:], bootstrap) if len(values) else values
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))])


@st.composite
def batches(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    rewards, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    valid = torch.rand(shape, generator=generator) > draw(st.sampled_from([0.0, 0.4]))  # ends, starts and holes
    rewards[~valid], values[~valid] = math.nan, math.nan
    return rewards, values, valid, torch.randn(shape[0], generator=generator, dtype=torch.float64)


@given(batches(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50)
def test_padding_and_holes_are_passed_over(batch, gamma, lam):
    rewards, values, valid, bootstrap = batch
    result = gae(rewards, values, valid, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for row, kept in enumerate(valid):
        r, v = rewards[row, kept].numpy(), values[row, kept].numpy()
        expected = by_definition(r, v, gamma=gamma, lam=lam, bootstrap=float(bootstrap[row]))
        np.testing.assert_allclose(result.advantages[row, kept].numpy(), expected, rtol=0, atol=1e-13)  # fp64
        np.testing.assert_allclose(result.returns[row, kept].numpy(), expected + v, rtol=0, atol=1e-13)
    assert not result.advantages[~valid].any() and not result.returns[~valid].any()


@given(batches(), st.floats(0, 1))
@settings(max_examples=30)
def test_at_lambda_1_the_return_is_the_reward_to_go_and_at_0_the_advantage_is_delta(batch, gamma):
    rewards, values, valid, _ = batch
    full = gae(rewards, values, valid, gamma=gamma, lam=1.0)
    torch.testing.assert_close(full.returns, rewards_to_go(rewards, valid, gamma=gamma), rtol=0, atol=1e-13)  # fp64
    one = gae(rewards, values, valid, gamma=gamma, lam=0.0).advantages
    for row, kept in enumerate(valid):
        r, v = rewards[row, kept], values[row, kept]
        delta = r + gamma * torch.cat([v, v.new_zeros(1)])[1:] - v
        torch.testing.assert_close(one[row, kept], delta, rtol=0, atol=1e-14)


def test_the_reward_stands_at_the_last_valid_token_and_the_kl_at_all():
    valid = torch.tensor([[True, True, False], [False, True, True], [True, False, True], [False] * 3])
    kl = torch.tensor([[0.1, 0.2, math.nan], [math.nan, 0.3, 0.4], [0.5, math.nan, 0.6], [math.nan] * 3])
    result = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), valid, kl=kl, kl_coefficient=0.5)
    expected = [[-0.05, 0.9, 0], [0, -0.15, 1.8], [-0.25, 0, 2.7], [0, 0, 0]]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)  # fp32
    plain = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), valid)
    assert plain.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 3], [0, 0, 0]]
    with pytest.raises(ValueError, match="no kl was given"):
        token_rewards(torch.ones(4), valid, kl_coefficient=0.1)


def test_reinforce_plus_plus_is_the_whitened_reward_to_go():
    """Two rows of 3 and 2 tokens, gamma 1, by hand: G counts what is ahead, then one mean and std over all tokens."""
    valid = torch.tensor([[True, True, True], [True, True, False]])
    kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
    to_go = rewards_to_go(token_rewards(torch.tensor([1.0, 0.0]), valid, kl=kl, kl_coefficient=0.1), valid)
    numbers = np.array([1 - 0.6, 1 - 0.5, 1 - 0.3, -0.9, -0.5])
    np.testing.assert_allclose(to_go[valid].numpy(), numbers, rtol=0, atol=1e-6)  # fp32
    result = whiten(to_go, valid)[valid].double().numpy()
    np.testing.assert_allclose(result, (numbers - numbers.mean()) / numbers.std(ddof=1), rtol=0, atol=1e-6)
    # Bessel's divisor leaves (count - 1) / count of the population variance.
    assert result.mean() == pytest.approx(0, abs=1e-7) and result.var() == pytest.approx(4 / 5, rel=1e-6)


def test_whitening_is_the_same_whatever_holds_the_tokens():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator, dtype=torch.float64) + 100
    valid = torch.rand(6, 4, generator=generator) > 0.3
    values[~valid] = math.nan
    numbers = values[valid].numpy()
    whole = whiten(values, valid, ddof=0)
    np.testing.assert_allclose(
        whole[valid].numpy(), (numbers - numbers.mean()) / numbers.std(), rtol=0, atol=1e-7
    )  # eps
    assert not whole[~valid].any()
    parts = [slice(0, 1), slice(1, 6)]
    moments = sum(token_moments(values[part], valid[part]) for part in parts)
    split = torch.cat([whiten(values[part], valid[part], moments=moments, ddof=0) for part in parts])
    # fp64; squares around 1e4 lose 4 of 16 digits of a variance of 1.
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-10)
    kept = whiten(values, valid, ddof=0, center=False)
    torch.testing.assert_close(kept[valid], whole[valid] + numbers.mean(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_whitening_refuses_what_would_make_every_value_nan(bad):
    values, valid = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    values[1, 2] = bad
    with pytest.raises(ValueError, match="whiten: the sum of the 6 valid values is"):
        whiten(values, valid)
    valid[1, 2] = False
    assert not whiten(values, valid).any()


def test_whitening_without_spread_gives_0():
    for values, valid in (
        (torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)),
        (torch.randn(2, 3), torch.tensor([[True, False, False], [False] * 3])),
        (torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)),
        (torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)),
    ):
        assert not whiten(values, valid).any()
    with pytest.raises(ValueError, match="must be equal"):
        whiten(torch.ones(2, 3), torch.ones(2, dtype=torch.bool))


def test_the_value_loss_by_hand():
    values = doubles([0.9, 1.5, 0.2, 1.0]).requires_grad_()
    old, returns = doubles([1.0, 1.0, 1.0, 1.0]), doubles([2.0, 2.0, 0.0, 1.5])
    result = clipped_value_loss(values, old, returns, clip=0.2)
    # Clipped values 0.9, 1.2, 0.8, 1.0: errors 1.1 | .5 or .8 | .2 or .8 | .5
    torch.testing.assert_close(result.loss, 0.5 * doubles([1.1, 0.8, 0.8, 0.5]).square(), rtol=1e-14, atol=0)
    assert result.clipped.tolist() == [[False, True, True, False]]
    (gradient,) = torch.autograd.grad(result.loss.sum(), [values])
    torch.testing.assert_close(gradient, doubles([-1.1, 0.0, 0.0, -0.5]), rtol=1e-14, atol=0)
    free = clipped_value_loss(values, old, returns, clip=math.inf)
    torch.testing.assert_close(free.loss, 0.5 * (values - returns).square())
    with pytest.raises(ValueError, match="clip = 0"):
        clipped_value_loss(values, old, returns, clip=0.0)
    with pytest.raises(ValueError, match="must be equal"):
        clipped_value_loss(values, old[:, :2], returns, clip=0.1)


def test_explained_variance():
    returns, valid = doubles([1.0, 2.0, 3.0, math.nan]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, valid) == 1.0
    # Sums of fp64.
    assert explained_variance(doubles([7.0, 7.0, 7.0, 0.0]), returns, valid) == pytest.approx(0.0, abs=1e-12)
    # Errors 0, 0, 1 of variance 2/9 against 2/3.
    assert explained_variance(doubles([1.0, 2.0, 2.0, 0.0]), returns, valid) == pytest.approx(2 / 3, rel=1e-12)
    assert explained_variance(returns, torch.ones(1, 4), valid) is None
    assert explained_variance(returns, returns, torch.zeros(1, 4, dtype=torch.bool)) is None


def test_what_does_not_fit_is_refused():
    valid = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gae: lam = 1\.5"):
        gae(torch.ones(2, 3), torch.ones(2, 3), valid, gamma=1.0, lam=1.5)
    with pytest.raises(ValueError, match=r"rewards_to_go: gamma = -0\.1"):
        rewards_to_go(torch.ones(2, 3), valid, gamma=-0.1)
    with pytest.raises(ValueError, match=r"gae: values \[2, 2\], bootstrap None"):
        gae(torch.ones(2, 3), torch.ones(2, 2), valid, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"gae: rewards \[2\]"):
        gae(torch.ones(2), torch.ones(2, 3), valid, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"token_rewards: rewards \[3\]"):
        token_rewards(torch.ones(3), valid)
