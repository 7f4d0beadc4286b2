"""Sequence ratios, CISPO, DRPO and SPO, importance weights and the overlong penalty, against golden numbers."""

import math

import numpy as np
import pytest
import torch
from unirl.numerics.loss.kl_config import TokenKlConfig
from unirl.numerics.loss.losses import cispo_loss, clipped_surrogate, sequence_log_ratio
from unirl.numerics.tokens.importance_weights import truncated_importance_weights
from unirl.numerics.tokens.kl import token_kl
from unirl.numerics.tokens.losses import completion_surrogate, drpo_loss
from unirl.numerics.tokens.overlong import soft_overlong_penalty

DELTAS = torch.tensor([[0.1, -0.1, 0.1], [0.1, -0.3, math.nan]], dtype=torch.float64)
VALID = torch.tensor([[True, True, True], [True, True, False]])


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_sequence_ratios_are_the_golden_ones_at_every_token():
    result = sequence_log_ratio(DELTAS, VALID).exp()
    # Golden numbers to 12 digits, in fp64.
    torch.testing.assert_close(result[0], doubles(1.033895113514).expand(3), rtol=0, atol=1e-12)
    torch.testing.assert_close(result[1, :2], doubles(0.904837418036).expand(2), rtol=0, atol=1e-12)
    assert float(result[1, 2]) == 1  # padding, whatever it held
    empty = sequence_log_ratio(torch.full((1, 2), math.nan), torch.zeros(1, 2, dtype=torch.bool))
    assert empty.tolist() == [[0.0, 0.0]]


def test_the_token_form_has_the_value_and_gradient_of_the_sequence_form():
    """With one advantage a sequence and the mean over its tokens."""
    log_ratio = torch.nan_to_num(DELTAS).requires_grad_()
    advantages, count = doubles(1.5, -0.7), VALID.sum(dim=1)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    token = clipped_surrogate(sequence_log_ratio(log_ratio, VALID), advantages, **clip).loss
    mean = ((token * VALID).sum(dim=1) / count).sum()
    whole = clipped_surrogate((log_ratio * VALID).sum(dim=1) / count, advantages, **clip).loss.sum()
    torch.testing.assert_close(mean, whole, rtol=1e-14, atol=0)  # fp64
    (mine,), (other,) = (torch.autograd.grad(loss, [log_ratio]) for loss in (mean, whole))
    torch.testing.assert_close(mine, other, rtol=1e-14, atol=0)
    assert float(mine[1, 2]) == 0


def test_the_completion_form_is_the_surrogate_of_the_product_of_the_ratios():
    """Summed over tokens, value and gradient are those of one clipped ratio a completion, as the log-probs' sums give."""
    log_ratio = torch.nan_to_num(DELTAS).requires_grad_()
    for advantages in (doubles(1.5, -0.7), doubles(-1.5, 0.7)):
        for clip in (0.05, 0.25):
            result = completion_surrogate(log_ratio, VALID, advantages, clip_low=clip, clip_high=clip)
            ratio = (log_ratio * VALID).sum(dim=1).exp()
            whole = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)).sum()
            summed = (result.loss * VALID).sum()
            torch.testing.assert_close(summed, whole, rtol=1e-14, atol=0)  # fp64
            (mine,), (other,) = (torch.autograd.grad(loss, [log_ratio]) for loss in (summed, whole))
            torch.testing.assert_close(mine, other, rtol=1e-14, atol=0)
            torch.testing.assert_close(result.ratio[:, 0], ratio.detach(), rtol=1e-14, atol=0)
    empty = torch.zeros(1, 2, dtype=torch.bool)
    assert completion_surrogate(
        torch.full((1, 2), math.nan), empty, doubles(1.0), clip_low=0.1, clip_high=0.1
    ).ratio.tolist() == [[1, 1]]


def test_a_token_of_a_sequence_has_its_own_gradient_alone():
    log_ratio = torch.nan_to_num(DELTAS).requires_grad_()
    (gradient,) = torch.autograd.grad(sequence_log_ratio(log_ratio, VALID)[0, 1], [log_ratio])
    assert gradient.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_cispo_weighs_the_log_prob_by_the_clipped_ratio():
    old = doubles(-1.0, -1.0, -1.0, -1.0)
    log_probs = (old + torch.log(doubles(0.5, 0.9, 1.1, 2.0))).requires_grad_()
    advantages = doubles(1.0, -2.0, 3.0, 4.0)
    result = cispo_loss(log_probs, old, advantages, clip_low=0.2, clip_high=0.3)
    weight = np.clip([0.5, 0.9, 1.1, 2.0], 0.8, 1.3)
    expected = -weight * advantages.numpy() * log_probs.detach().numpy()
    np.testing.assert_allclose(result.loss.detach().numpy(), expected, rtol=1e-14)  # fp64
    assert result.clipped.tolist() == [True, False, False, True] and not result.binding.any()
    (gradient,) = torch.autograd.grad(result.loss.sum(), [log_probs])
    np.testing.assert_allclose(gradient.numpy(), -weight * advantages.numpy(), rtol=1e-14)  # clipped or not
    free = cispo_loss(log_probs, old, advantages, clip_low=1.0, clip_high=0.3)
    assert free.clipped.tolist() == [False, False, False, True]
    with pytest.raises(ValueError, match=r"clip_low = 1\.5"):
        cispo_loss(log_probs, old, advantages, clip_low=1.5, clip_high=0.3)


def test_no_ratio_of_a_token_overflows():
    """fp32, where exp(89) is infinite: CISPO's weight and the KL penalty weighted by the ratio."""
    log_probs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-90.0, -1e4, 1e4]])
    result = cispo_loss(log_probs, old, torch.tensor([0.0]), clip_low=1.0, clip_high=4.0)
    assert result.ratio.tolist() == [pytest.approx([math.exp(20), math.exp(20), math.exp(-20)], rel=1e-5)]
    assert result.loss.tolist() == [[0.0, 0.0, 0.0]]
    config = TokenKlConfig(kl_coef=0.1, kl_weighs_by_ratio=True)
    kl = token_kl(log_probs, log_probs.detach() - 0.5, old_log_probs=old, config=config)
    # k3 of d = 0.5 at the bounded ratio, whose own gradient is 0: d kl / d log pi = ratio (1 - exp(-d)).
    ratio = [math.exp(20), math.exp(20), math.exp(-20)]
    assert kl.tolist() == [pytest.approx([r * (math.exp(-0.5) - 0.5) for r in ratio], rel=1e-5)]
    (gradient,) = torch.autograd.grad(kl.sum(), [log_probs])
    assert gradient.tolist() == [pytest.approx([r * (1 - math.exp(-0.5)) for r in ratio], rel=1e-5)]


def test_cispo_at_ratio_1_is_reinforce():
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    result = cispo_loss(log_probs, log_probs.detach(), torch.tensor([1.5, -0.7]), clip_low=1.0, clip_high=0.2)
    (gradient,) = torch.autograd.grad(result.loss.sum(), [log_probs])
    assert gradient.tolist() == torch.tensor([[-1.5, -1.5], [0.7, 0.7]]).tolist()


def test_drpo_gives_the_golden_numbers_and_spo_leaves_out_the_probability():
    old, new, advantages = doubles(0.5, 0.1), doubles(0.6, 0.08), doubles(1.0, -1.0)
    log_ratio = (new / old).log()
    result = drpo_loss(log_ratio, advantages, old_log_probs=old.log(), delta=12.5)
    torch.testing.assert_close(result.loss, doubles(-1.1992, 0.80016), rtol=0, atol=1e-14)  # exact numbers, in fp64
    spo = drpo_loss(log_ratio, advantages, old_log_probs=None, delta=12.5)
    # -A r + |A| (r - 1)^2 / 25 with r = 1.2 and 0.8
    torch.testing.assert_close(spo.loss, doubles(-1.2 + 0.0016, 0.8 + 0.0016), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="delta = 0"):
        drpo_loss(log_ratio, advantages, old_log_probs=None, delta=0.0)


def test_the_gradient_of_drpo_is_bounded_and_unbiased_at_ratio_1():
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(200, generator=generator, dtype=torch.float64).clamp(0.01, 0.99)
    new = torch.rand(200, generator=generator, dtype=torch.float64).clamp(0.01, 0.99)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    new[0] = old[0]
    log_ratio = (new / old).log().requires_grad_()
    loss = drpo_loss(log_ratio, advantages, old_log_probs=old.log(), delta=12.5).loss.sum()
    (gradient,) = torch.autograd.grad(loss, [log_ratio])
    ratio = new / old
    weight = 1 - torch.sign(advantages * (ratio - 1)) * (new - old).abs() / 12.5
    torch.testing.assert_close(gradient, -advantages * ratio * weight, rtol=1e-12, atol=1e-14)  # fp64
    assert float(gradient[0]) == pytest.approx(-float(advantages[0]), rel=1e-14)
    assert bool(((weight >= 1 - 1 / 12.5) & (weight <= 1 + 1 / 12.5)).all())


def test_log_ratios_beyond_every_scale_stay_finite_and_are_counted():
    log_ratio = torch.tensor([500.0, -500.0, 0.0], requires_grad=True)
    result = drpo_loss(log_ratio, torch.ones(3), old_log_probs=torch.full((3,), -500.0), delta=12.5)
    (gradient,) = torch.autograd.grad(result.loss.sum(), [log_ratio])
    assert bool(result.loss.isfinite().all()) and gradient.tolist() == [0.0, 0.0, -1.0]
    assert result.binding.tolist() == [True, True, False]


LOG_PROBS = torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -1.0, math.nan]])
SAMPLER = torch.tensor([[-1.5, -3.0, -1.0], [-0.9, -1.2, 7.0]])


def test_token_weights_are_the_capped_ratios():
    result = truncated_importance_weights(LOG_PROBS, SAMPLER, VALID, cap=2.0)
    ratio = np.exp([0.5, 1.0, -0.5, -0.1, 0.2])
    expected = np.append(np.minimum(ratio, 2.0), 1.0).reshape(2, 3)
    np.testing.assert_allclose(result.weights.numpy(), expected, rtol=1e-6)  # fp32
    assert result.capped.tolist() == [False, True, False, False, False]
    metrics = result.metrics()
    values = {name: m.total / (1 if m.reduce == "max" else m.weight) for name, m in metrics.items()}
    assert values == pytest.approx(
        {
            "importance_ratio": ratio.mean(),
            "importance_ratio_max": math.e,
            "importance_cut": (math.e - 2) / 5,
            "importance_capped": 1 / 5,
        },
        rel=1e-6,  # fp32
    )


def test_sequence_weights_are_the_capped_product_of_the_row():
    result = truncated_importance_weights(LOG_PROBS, SAMPLER, VALID, cap=2.0, level="sequence")
    # exp(0.5 + 1.0 - 0.5) = e is capped; exp(-0.1 + 0.2) is not.
    expected = [[2.0, 2.0, 2.0], [math.exp(0.1), math.exp(0.1), 1.0]]
    np.testing.assert_allclose(result.weights.numpy(), expected, rtol=1e-6)  # fp32
    assert result.capped.tolist() == [True, False]
    assert result.metrics()["importance_capped"].weight == 2


def test_the_weights_are_constants_and_1_without_a_gap():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    result = truncated_importance_weights(log_probs, log_probs, torch.ones(1, 2, dtype=torch.bool), cap=2.0)
    assert result.weights.tolist() == [[1.0, 1.0]] and not result.weights.requires_grad
    none = truncated_importance_weights(log_probs, log_probs, torch.zeros(1, 2, dtype=torch.bool), cap=2.0)
    assert all(metric.weight == 0 for metric in none.metrics().values())
    with pytest.raises(ValueError, match="cap = 0"):
        truncated_importance_weights(log_probs, log_probs, torch.ones(1, 2, dtype=torch.bool), cap=0.0)
    with pytest.raises(ValueError, match="'group' is not known"):
        truncated_importance_weights(log_probs, log_probs, torch.ones(1, 2, dtype=torch.bool), cap=2.0, level="group")


def test_the_overlong_penalty_of_dapo():
    """Its published numbers: at most 20480 tokens, the last 4096 of them penalised."""
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert soft_overlong_penalty(lengths, max_tokens=20480, buffer=4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 20481):
        with pytest.raises(ValueError, match="0 < buffer <= max_tokens"):
            soft_overlong_penalty(lengths, max_tokens=20480, buffer=buffer)
