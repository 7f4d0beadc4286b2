"""Losses and divergences against golden vectors and identities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.diffusion.guidance import NO_GUIDANCE
from unirl.numerics.diffusion.kernels import Cps, DanceSde, DdimEta, FlowSde
from unirl.numerics.diffusion.sampler import sampler_of, schedule_coefficients
from unirl.numerics.loss.losses import (
    bounded_ratio,
    clip_schedule,
    clipped_surrogate,
    divergence_surrogate,
    flow_grpo_kl,
    gaussian_kl,
    mean_shift_squared,
    ratio_norm,
    velocity_kl,
)
from unirl.numerics.loss.reduction import LossTerm, reduce_terms

OLD = torch.tensor([-1.0, -1.0002, -0.9999, -1.00005], dtype=torch.float64)
NEW = torch.tensor([-0.99985, -1.00025, -1.0001, -1.00004], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, -0.7, 6.0, -2.0], dtype=torch.float64).clamp(-5, 5)
GOLDEN = 1e-11  # golden numbers to 12 digits, in fp64


def close(found, expected, tolerance=GOLDEN):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


def test_the_flow_grpo_loss_gives_the_golden_numbers():
    result = clipped_surrogate(NEW - OLD, ADVANTAGES, clip_low=1e-4, clip_high=1e-4)
    close(result.ratio, [1.000150011251, 0.99995000125, 0.999800019999, 1.00001000005])
    close(result.loss, [-1.50015, 0.699965000875, -4.999000099993, 2.0000200001])
    close(result.loss.mean(), -0.9497912747545868, 1e-15)
    assert result.clipped.tolist() == [True, False, True, False]  # a clip fraction of 0.5
    # The third moved against its advantage: outside the range, and pulled back by its gradient.
    assert result.binding.tolist() == [True, False, False, False]


def test_the_guard_loss_gives_the_golden_numbers():
    d = torch.tensor([2e-5, 5e-6, 3e-5, 2e-5], dtype=torch.float64)
    std = torch.full((4,), 0.35, dtype=torch.float64)
    log_ratio = ratio_norm(NEW - OLD, mean_shift_sq=d * 2 * std.square(), std=std)
    result = clipped_surrogate(log_ratio, ADVANTAGES, clip_low=2e-6, clip_high=2e-6)
    close(result.ratio, [1.00005950177, 0.999984250124, 0.99994050177, 1.000010500055])
    close(result.loss.mean(), -0.9499214771850496, 1e-12)


DIVERGENCES = torch.tensor([2e-5, 5e-6, 3e-5, 2e-5], dtype=torch.float64)


def test_the_divergence_mask_gives_the_golden_numbers():
    result = divergence_surrogate(NEW - OLD, ADVANTAGES, divergence=DIVERGENCES, threshold=1e-5)
    close(result.loss.mean(), -0.5747537747545869, 1e-15)
    assert (result.loss != 0).tolist() == [False, True, True, True]  # which of them are kept
    assert result.binding.tolist() == [True, False, False, False]
    assert result.clipped.tolist() == [True, False, True, True]


def test_the_divergence_mask_drops_what_is_far_and_goes_further():
    """All signs of the advantage and of the move, near and far; the divergence gets no gradient."""
    log_ratio = torch.tensor([0.1, 0.1, -0.1, -0.1, 0.0, 0.0], dtype=torch.float64).repeat(2).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 1.0, -2.0, 1.0, -2.0], dtype=torch.float64).repeat(2)
    divergence = torch.tensor([0.5] * 6 + [0.499] * 6, dtype=torch.float64, requires_grad=True)
    result = divergence_surrogate(log_ratio, advantages, divergence=divergence, threshold=0.5)
    result.loss.sum().backward()
    plain = -advantages * log_ratio.detach().exp()
    kept = torch.tensor([False, True, True, False, True, True] + [True] * 6)
    torch.testing.assert_close(result.loss.detach(), plain * kept, rtol=1e-14, atol=0)  # fp64
    torch.testing.assert_close(log_ratio.grad, plain * kept, rtol=1e-14, atol=0)
    assert divergence.grad is None


def test_a_threshold_of_infinity_is_the_weighted_policy_gradient_and_a_tiny_one_keeps_what_moves_back():
    free = divergence_surrogate(NEW - OLD, ADVANTAGES, divergence=DIVERGENCES, threshold=math.inf)
    assert torch.equal(free.loss, -ADVANTAGES * (NEW - OLD).exp())
    assert not free.clipped.any() and not free.binding.any()
    tight = divergence_surrogate(NEW - OLD, ADVANTAGES, divergence=DIVERGENCES, threshold=1e-300)
    # The first two moved with their advantage; the last one's ratio rose with a negative advantage, the third's fell
    # with a positive one.
    assert tight.binding.tolist() == [True, True, False, False]


def test_a_mask_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="threshold = 0"):
        divergence_surrogate(NEW, ADVANTAGES, divergence=DIVERGENCES, threshold=0.0)
    with pytest.raises(ValueError, match="must be equal"):
        divergence_surrogate(NEW, ADVANTAGES, divergence=DIVERGENCES[:2], threshold=1.0)
    with pytest.raises(ValueError, match="leading dims"):
        divergence_surrogate(NEW, ADVANTAGES[:2], divergence=DIVERGENCES, threshold=1.0)


def test_the_ppo_loss_gives_the_golden_numbers():
    log_ratio = torch.tensor([0.5, -0.5, 1.5, 0.1], dtype=torch.float64)
    weight = torch.tensor([1.0, 1, -1, -1], dtype=torch.float64)
    expected = [-1.2, -0.6065306597, 4.4816890703, 1.1051709181]
    plain = clipped_surrogate(log_ratio, weight, clip_low=0.2, clip_high=0.2)
    close(plain.loss, expected, 1e-10)
    dual = clipped_surrogate(log_ratio, weight, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    close(dual.loss, [*expected[:2], 3.0, expected[3]], 1e-10)
    assert dual.binding.tolist() == [True, False, True, False]
    dapo = clipped_surrogate(log_ratio, weight, clip_low=0.2, clip_high=0.28)
    close(dapo.loss[0], -1.28, 1e-12)


def test_gspo_ratios_give_the_golden_numbers():
    """A sequence's log-ratio is the mean over its tokens; the loss is the same function."""
    log_ratio = torch.tensor([(0.1 - 0.1 + 0.1) / 3, (0.1 - 0.3) / 2], dtype=torch.float64)
    result = clipped_surrogate(log_ratio, torch.ones(2, dtype=torch.float64), clip_low=3e-4, clip_high=4e-4)
    close(result.ratio, [1.033895113514, 0.904837418036])


def test_at_ratio_1_the_loss_is_minus_the_advantage_and_the_gradient_is_reinforce():
    log_prob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    weight = torch.tensor([1.5, -0.7, 0.0])
    result = clipped_surrogate(log_prob - log_prob.detach(), weight, clip_low=1e-4, clip_high=1e-4)
    assert torch.equal(result.loss, -weight)
    assert not result.clipped.any() and not result.binding.any()
    (gradient,) = torch.autograd.grad(result.loss.sum(), [log_prob])
    assert torch.equal(gradient, -weight)


@given(
    st.floats(-3, 3),
    # The gradient of a subnormal weight may round to 0.
    st.floats(-5, 5, allow_subnormal=False),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.9),
    st.one_of(st.none(), st.floats(2.0, 5.0)),
)
@settings(max_examples=200)
def test_the_surrogate_is_its_formula_and_binding_is_where_the_gradient_is_0(log_ratio, weight, low, high, dual):
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    result = clipped_surrogate(
        x, torch.tensor([weight], dtype=torch.float64), clip_low=low, clip_high=high, dual_clip=dual
    )
    r = math.exp(log_ratio)
    expected = max(-weight * r, -weight * min(max(r, 1 - low), 1 + high))
    if dual is not None and weight < 0:
        expected = min(expected, -weight * dual)
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-300)  # fp64 rounding
    (gradient,) = torch.autograd.grad(result.loss.sum(), [x])
    near_edge = min(abs(r - 1 + low), abs(r - 1 - high), abs(r - (dual or 99))) < 1e-9
    if weight != 0 and not near_edge:
        assert bool(result.binding) == (float(gradient) == 0)
        assert bool(result.clipped) == (not 1 - low <= r <= 1 + high)


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [89.0, 1e4, math.inf, -200.0, -math.inf])
def test_a_log_ratio_beyond_20_is_clamped_and_moves_nothing(log_ratio, dual):
    """In fp32, where exp(88.8) is infinite. The advantages are positive, 0 and negative; the last row is filtered."""
    near = torch.tensor([0.05, 0.05, 0.05, 0.05])
    x = torch.stack([near, torch.full((4,), log_ratio)], dim=1).requires_grad_()
    advantages = torch.tensor([2.0, 0.0, -2.0, -2.0])
    result = clipped_surrogate(x, advantages, clip_low=0.2, clip_high=0.2, dual_clip=dual)
    ratio = math.exp(math.copysign(20.0, log_ratio))
    assert result.ratio[:, 1].tolist() == pytest.approx([ratio] * 4, rel=1e-5)  # 20 ulps of fp32: exp multiplies them
    expected = [max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)) for a in advantages.tolist()]
    if dual is not None:
        expected = [
            min(loss, -a * dual) if a < 0 else loss for loss, a in zip(expected, advantages.tolist(), strict=True)
        ]
    assert result.loss[:, 1].tolist() == pytest.approx(expected, rel=1e-5)
    assert result.clipped[:, 1].all() and result.binding[:, 1].all()
    weights = torch.tensor([[1.0], [1.0], [1.0], [0.0]]).expand(4, 2)
    term = LossTerm(name="policy", values=result.loss, weights=weights)
    reduce_terms([term], totals={"policy": weights.sum()}).backward()
    assert x.grad[:, 1].tolist() == [0, 0, 0, 0]
    # The others keep the plain gradient, -A r / 6, and the filtered row has none.
    plain = (-advantages * near.exp() / 6 * weights[:, 0]).tolist()
    assert x.grad[:, 0].tolist() == pytest.approx(plain, rel=1e-6)


def test_log_ratios_up_to_20_are_left_as_they_are():
    x = torch.tensor([-20.0, -1e-3, 0.0, 1e-3, 20.0], requires_grad=True)
    result = bounded_ratio(x)
    assert torch.equal(result, x.detach().exp())
    (gradient,) = torch.autograd.grad(result.sum(), [x])
    assert torch.equal(gradient, x.detach().exp())


def test_advantages_of_samples_reach_every_step():
    log_ratio = torch.zeros(3, 4)
    weight = torch.tensor([1.0, 2.0, 3.0])
    result = clipped_surrogate(log_ratio, weight, clip_low=0.1, clip_high=0.1)
    assert torch.equal(result.loss, -weight[:, None].expand(3, 4))
    # Four samples and four steps must not be confused: [4] is per sample.
    square = clipped_surrogate(torch.zeros(4, 4), torch.arange(4.0), clip_low=0.1, clip_high=0.1)
    assert torch.equal(square.loss[:, 0], -torch.arange(4.0))
    with pytest.raises(ValueError, match="leading dims"):
        clipped_surrogate(log_ratio, torch.ones(4), clip_low=0.1, clip_high=0.1)


def test_ranges_that_make_no_sense_are_refused():
    for low, high, dual in ((1.5, 0.1, None), (-0.1, 0.1, None), (0.1, -0.1, None), (0.1, 0.1, 1.05)):
        with pytest.raises(ValueError, match="clipped_surrogate"):
            clipped_surrogate(torch.zeros(1), torch.ones(1), clip_low=low, clip_high=high, dual_clip=dual)


def test_a_clip_of_1_has_no_lower_bound():
    log_ratio = torch.tensor([-30.0, -2.0, 0.5])
    result = clipped_surrogate(log_ratio, torch.tensor([-1.0, -1.0, 1.0]), clip_low=1.0, clip_high=10.0)
    # -A r.
    assert result.loss.tolist() == pytest.approx([math.exp(-20), math.exp(-2), -math.exp(0.5)], rel=1e-6, abs=1e-8)
    assert not result.clipped.any()


def test_the_clip_schedules():
    for name, start, middle, end in (
        ("constant", 2.0, 2.0, 2.0),
        ("linear", 2.0, 1.5, 1.0),
        ("cosine", 2.0, 1.0, 0.0),
    ):
        assert [clip_schedule(name, 2.0, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([start, middle, end])
    with pytest.raises(ValueError, match="'step' is not known"):
        clip_schedule("step", 1.0, 0.5)
    with pytest.raises(ValueError, match=r"progress = 1\.5"):
        clip_schedule("linear", 1.0, 1.5)


def transitions(sigma, sigma_next, eta, *, seed=0, shape=(4, 2, 3)):
    """Two fp64 means of a Flow-SDE step, its s and g, and the velocities they came from."""
    generator = torch.Generator().manual_seed(seed)
    x, v, v_ref = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    g = eta * math.sqrt(sigma / (1 - sigma))
    dt = sigma_next - sigma

    def mean(velocity):
        return x + dt * velocity + 0.5 * g**2 * dt * (x + (1 - sigma) * velocity) / sigma

    std = torch.full((4, 1, 1), g * math.sqrt(-dt), dtype=torch.float64)
    return mean(v), mean(v_ref), std, torch.full_like(std, g), v, v_ref, dt


@given(st.floats(0.05, 0.99), st.floats(0.05, 0.9), st.floats(0.1, 1.5))
@settings(max_examples=30)
def test_three_forms_of_the_kl_agree(sigma, fraction, eta):
    """True Gaussian KL == flow_grpo's coded form / (-dt) == the paper's form in the velocities."""
    mean, reference, std, g, v, v_ref, dt = transitions(sigma, sigma * fraction, eta)
    true = gaussian_kl(mean, reference, std, batch_dims=1)
    coded = flow_grpo_kl(mean, reference, g, batch_dims=1)
    factor = float(g[0, 0, 0]) * (1 - sigma) / (2 * sigma) + 1 / float(g[0, 0, 0])
    paper = -dt / 2 * factor**2 * (v - v_ref).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(coded / -dt, true, rtol=1e-12, atol=0)  # fp64
    torch.testing.assert_close(paper, true, rtol=1e-9, atol=0)  # fp64, with a difference of means inside
    for row in range(4):
        normal = torch.distributions.Normal(mean[row], std[row])
        other = torch.distributions.Normal(reference[row], std[row])
        by_torch = torch.distributions.kl_divergence(normal, other).mean()
        torch.testing.assert_close(true[row], by_torch, rtol=1e-9, atol=0)


def test_the_kl_takes_what_replay_gives():
    mean, reference = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    std = torch.rand(2, 3, 1, 1) + 0.5
    result = gaussian_kl(mean, reference, std)
    assert result.shape == (2, 3)
    assert torch.equal(result, gaussian_kl(mean, reference, std.view(2, 3)))
    expected = float((mean - reference)[1, 2].square().mean() / (2 * std[1, 2] ** 2))
    assert float(result[1, 2]) == pytest.approx(expected, rel=1e-6)  # fp32
    assert float(gaussian_kl(mean, mean, std).abs().max()) == 0
    with pytest.raises(ValueError, match="must be equal"):
        gaussian_kl(mean, reference[:, :1], std)


def test_ratio_norm_removes_the_bias_of_the_log_ratio():
    """log r + b == mean(shift * noise) / s exactly, whose mean over the noise is 0."""
    mean, old_mean, std, *_ = transitions(0.75, 0.6, 0.7)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    x_next = old_mean + std * noise

    def log_prob(centre):
        return torch.distributions.Normal(centre, std).log_prob(x_next).flatten(1).mean(dim=1)

    shift = mean - old_mean
    log_ratio = log_prob(mean) - log_prob(old_mean)
    result = ratio_norm(log_ratio, mean_shift_sq=mean_shift_squared(mean, old_mean, batch_dims=1), std=std)
    torch.testing.assert_close(result, (shift * noise).flatten(1).mean(dim=1), rtol=1e-9, atol=1e-12)  # fp64


def test_the_kl_of_the_kernels_own_std_is_that_of_its_transitions():
    x, v, v_ref = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    sigma, sigma_next = torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.4])
    step, reference = (
        FlowSde().transition(x, velocity=each, sigma=sigma, sigma_next=sigma_next, sigma_max=0.9) for each in (v, v_ref)
    )
    result = gaussian_kl(step.mean, reference.mean, step.std, batch_dims=1)
    g2 = 0.49 * sigma / (1 - sigma)
    factor = g2.sqrt() * (1 - sigma) / (2 * sigma) + g2.rsqrt()
    expected = (sigma - sigma_next) / 2 * factor**2 * (v - v_ref).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)  # fp32, with a difference of means inside


@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), Cps(), DdimEta(), DdimEta(prediction="v")])
def test_the_velocity_kl_is_the_squared_distance_of_the_velocities_for_every_kernel(kernel):
    """From the means of a step alone."""
    sigmas = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.0]) * (4.0 if isinstance(kernel, DdimEta) else 1.0)
    x, v, v_ref = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    sigma, sigma_next = sigmas[:3], sigmas[1:4]
    step, reference = (
        kernel.transition(x, velocity=each, sigma=sigma, sigma_next=sigma_next, sigma_max=sigmas[1])
        for each in (v, v_ref)
    )
    on_velocity = schedule_coefficients(sampler_of(kernel, NO_GUIDANCE), sigmas).on_velocity[:3]
    result = velocity_kl(step.mean, reference.mean, on_velocity, batch_dims=1)
    expected = (v - v_ref).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=0)  # fp32: a difference of means over a factor of 0.1
