"""The kernels against golden vectors, fp64 formulas, the invariants K1 to K8 and diffusers."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.diffusion.kernels import Cps, DanceSde, DdimEta, Dpm2, EulerOde, FlowSde, make_kernel
from unirl.numerics.diffusion.schedules import ddpm_sigmas, static_sigmas

X = [0.5, -1.0, 0.25, 2.0]
V = [1.0, 0.5, -0.75, -0.25]
NOISE = [0.3, -0.6, 1.2, -0.9]
# Golden numbers are given to 9 digits and the kernels run in fp32, whose rounding at magnitude 2 is 1.2e-7 per operation.
GOLDEN = 5e-7
# Log-probs of a step divide by s^2; s = 0.0866 turns 1e-7 in the mean into 3e-6.
GOLDEN_LOG_PROB = 4e-6


def step(kernel, x, v, sigma, sigma_next, sigma_max=27 / 28, history=None):
    x, v = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(v, dtype=torch.float32)
    if x.ndim == 1:
        x, v = x[None], v[None]
    rows = torch.ones(x.shape[0])
    return kernel.transition(
        x, velocity=v, sigma=rows * sigma, sigma_next=rows * sigma_next, sigma_max=sigma_max, history=history
    )


def close(found, expected, tolerance):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64).flatten(),
        torch.as_tensor(expected, dtype=torch.float64).flatten(),
        rtol=0,
        atol=tolerance,
    )


GOLDEN_STEPS = [
    (
        FlowSde(0.7),
        0.35,
        [0.355416667, -0.970208333, 0.307395833, 1.862604167],
        [0.460416667, -1.180208333, 0.727395833, 1.547604167],
        -0.206616409,
    ),
    (
        DanceSde(0.3),
        0.086602540,
        [0.412916667, -1.037291667, 0.3121875, 2.011145833],
        [0.438897429, -1.089253191, 0.416110548, 1.933203547],
        1.189987596,
    ),
    (
        Cps(0.8),
        0.634037678,
        [0.071175164, -0.638593247, 0.283709041, 1.128313618],
        [0.261386467, -1.019015853, 1.044554254, 0.557679708],
        -0.800791635,
    ),
    (
        Cps(0.8, constants=False),
        0.634037678,
        [0.071175164, -0.638593247, 0.283709041, 1.128313618],
        [0.261386467, -1.019015853, 1.044554254, 0.557679708],
        -0.271352549,
    ),
]


@pytest.mark.parametrize(
    ("kernel", "std", "mean", "x_next", "log_prob"), GOLDEN_STEPS, ids=lambda v: getattr(v, "name", "")
)
def test_a_step_gives_the_golden_numbers(kernel, std, mean, x_next, log_prob):
    transition = step(kernel, X, V, 0.75, 2 / 3)
    sampled = kernel.sample(transition, torch.tensor([NOISE]))
    close(transition.std, [std], GOLDEN)
    close(transition.mean, mean, GOLDEN)
    close(sampled, x_next, GOLDEN)
    close(kernel.log_prob(sampled, transition), [log_prob], GOLDEN_LOG_PROB)


def test_the_first_step_of_flow_sde_gives_the_golden_numbers():
    kernel = FlowSde(0.7)
    transition = step(kernel, X, V, 1.0, 27 / 28)
    close(transition.std, [0.7], GOLDEN)
    # 1 - 27/28 in fp32 has a relative error of 1e-6.
    close(transition.g, [3.704051835], 4e-6)
    close(transition.mean, [0.341785714, -0.772857143, 0.215535714, 1.518928571], GOLDEN)
    sampled = kernel.sample(transition, torch.tensor([NOISE]))
    close(kernel.log_prob(sampled, transition), [-0.899763589], GOLDEN_LOG_PROB)


def test_euler_gives_the_golden_numbers():
    transition = step(EulerOde(), X, V, 0.75, 2 / 3)
    close(transition.mean, [0.416666667, -1.041666667, 0.3125, 2.020833333], GOLDEN)
    assert transition.std.abs().max() == 0


def scaled_linear_alphas_bar():
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    return np.cumprod(1.0 - betas)


def test_a_ddim_step_gives_the_golden_numbers():
    sigma, sigma_next, _ = ddpm_sigmas(scaled_linear_alphas_bar().tolist(), timesteps=[601, 581]).tolist()
    kernel = DdimEta(1.0)
    transition = step(kernel, X, V, sigma, sigma_next)
    close(transition.std, [0.329845703], GOLDEN)
    close(transition.mean, [0.401435299, -1.125366058, 0.361965379, 2.153983478], GOLDEN)
    sampled = kernel.sample(transition, torch.tensor([NOISE]))
    close(kernel.log_prob(sampled, transition), [-0.147308233], GOLDEN_LOG_PROB)


def test_the_std_of_flow_sde_along_a_schedule_is_the_published_one():
    sigmas = static_sigmas(10, shift=3.0)
    x = torch.zeros(10, 4)
    result = FlowSde(0.7).transition(x, velocity=x, sigma=sigmas[:-1], sigma_next=sigmas[1:], sigma_max=sigmas[1])
    expected = [0.7, 0.73837, 0.53169, 0.44146, 0.38774, 0.35, 0.3195, 0.29047, 0.25617, 0.20207]
    close(result.std, expected, 5e-6)  # the list has five digits


SIGMA = st.floats(0.02, 0.999)
FRACTION = st.floats(0.05, 0.95)
ETA = st.floats(0.05, 1.0)
SEED = st.integers(0, 2**31)


def latents(seed, shape=(3, 5)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@given(SIGMA, FRACTION, SEED)
@settings(max_examples=30)
def test_k1_without_noise_every_kernel_is_euler(sigma, fraction, seed):
    x, v = latents(seed)
    euler = step(EulerOde(), x, v, sigma, sigma * fraction)
    for kernel in (FlowSde(0.0), DanceSde(0.0)):
        result = step(kernel, x, v, sigma, sigma * fraction)
        assert torch.equal(result.mean, euler.mean)  # 1 x + dt v: no rounding may differ
        assert result.std.abs().max() == 0
        assert not kernel.is_stochastic
    # CPS reaches dt by another sum of products: a few fp32 roundings at magnitude 5.
    torch.testing.assert_close(step(Cps(0.0), x, v, sigma, sigma * fraction).mean, euler.mean, rtol=0, atol=3e-6)


@given(SIGMA, FRACTION, ETA, SEED)
@settings(max_examples=30)
def test_k2_dance_is_flow_where_g_is_eta(sigma, fraction, eta, seed):
    x, v = latents(seed)
    dance = step(DanceSde(eta), x, v, sigma, sigma * fraction)
    # The sigma that the kernels get: near 1, that of fp64 has another 1 - sigma.
    given = float(torch.tensor(sigma))
    flow = step(FlowSde(eta * math.sqrt((1 - given) / given)), x, v, sigma, sigma * fraction)
    # eta^2 / (2 sigma) reaches 25 at sigma = 0.02, so 1e-7 in g becomes 1e-5 of the mean in the worst case.
    torch.testing.assert_close(dance.mean, flow.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dance.std, flow.std, rtol=1e-5, atol=0)


@given(FRACTION, SEED)
@settings(max_examples=20)
def test_k3_full_cps_is_the_stochastic_sampling_of_diffusers(fraction, seed):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    scheduler.set_timesteps(sigmas=[1.0, fraction, fraction / 2])
    x, v = latents(seed)
    theirs = scheduler.step(
        v, scheduler.timesteps[1], x, generator=torch.Generator().manual_seed(seed), return_dict=False
    )[0]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    kernel = Cps(1.0)
    transition = step(kernel, x, v, scheduler.sigmas[1], scheduler.sigmas[2])
    # The same numbers summed in another order, at magnitude 5: some fp32 roundings.
    torch.testing.assert_close(kernel.sample(transition, noise), theirs, rtol=0, atol=1e-6)


@given(st.floats(0.5, 20.0), st.integers(2, 60))
@settings(max_examples=30)
def test_k4_the_first_std_of_flow_sde_is_eta_at_any_shift(shift, num_steps):
    sigmas = static_sigmas(num_steps, shift=shift)
    x = torch.zeros(1, 4)
    transition = FlowSde(0.7).transition(x, velocity=x, sigma=sigmas[:1], sigma_next=sigmas[1:2], sigma_max=sigmas[1])
    # g sqrt(-dt) with g = eta / sqrt(-dt): the same fp32 number in both, so two roundings remain.
    torch.testing.assert_close(transition.std.flatten(), torch.tensor([0.7]), rtol=3e-7, atol=0)


def gaussian_data_variance(kernel, num_steps):
    """Terminal variance of the kernel on x0 ~ N(0, 1/4), by the exact linear recursion of the second moment."""
    sigmas = static_sigmas(num_steps, shift=1.0)
    sigma = sigmas[:-1].double()
    # E[v | x] = (sigma - (1 - sigma) / 4) / (sigma^2 + (1 - sigma)^2 / 4) x for this data.
    slope = (sigma - (1 - sigma) * 0.25) / (sigma**2 + (1 - sigma) ** 2 * 0.25)
    x = torch.ones(num_steps, 1)
    result = kernel.transition(
        x, velocity=slope[:, None].float(), sigma=sigmas[:-1], sigma_next=sigmas[1:], sigma_max=sigmas[1]
    )
    variance = 1.0
    for gain, std in zip(result.mean.double().flatten(), result.std.double().flatten(), strict=True):
        variance = float(gain**2 * variance + std**2)
    return variance


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [(EulerOde(), 0.24971), (FlowSde(0.7), 0.25066), (DanceSde(0.3), 0.24975)],
    ids=["euler", "flow", "dance"],
)
def test_k5_small_steps_reach_the_variance_of_the_data(kernel, expected):
    # Five published digits, plus 2,560 fp32 roundings of gains near 1.
    assert gaussian_data_variance(kernel, 2560) == pytest.approx(expected, abs=3e-5)


def test_k5_small_steps_of_cps_do_not_reach_the_variance_of_the_data():
    assert gaussian_data_variance(Cps(0.8), 2560) == pytest.approx(0.163, abs=6e-4)  # three published digits


def test_k6_on_the_exact_path_cps_keeps_the_noise_level_and_flow_exceeds_it():
    sigma, sigma_next, eta = 0.6, 0.5, 0.7

    # x0 = 0 and v = x1: the path is x = sigma x1, so a mean of (gain) x1 has noise variance gain^2 + s^2.
    def noise_variance(kernel):
        result = step(kernel, [[sigma]], [[1.0]], sigma, sigma_next)
        return float(result.mean**2 + result.std**2)

    g2, dt = eta**2 * sigma / (1 - sigma), sigma - sigma_next
    assert noise_variance(Cps(eta)) == pytest.approx(sigma_next**2, abs=1e-7)
    excess = g2 * dt**2 / sigma + g2**2 * dt**2 / (4 * sigma**2)
    assert noise_variance(FlowSde(eta)) == pytest.approx(sigma_next**2 + excess, abs=2e-7)
    assert noise_variance(FlowSde(eta)) == pytest.approx(0.2660016, abs=2e-7)


@given(SIGMA, FRACTION, ETA, SEED)
@settings(max_examples=30)
def test_k7_and_k8_the_means_are_the_fp64_formulas(sigma, fraction, eta, seed):
    sigma, sigma_next = float(np.float32(sigma)), float(np.float32(sigma * fraction))
    x, v = (part.clamp(-3, 3) for part in latents(seed))
    dt, x64, v64 = sigma_next - sigma, x.double(), v.double()
    x0, x1 = x64 - sigma * v64, x64 + (1 - sigma) * v64
    score_term = (x64 + (1 - sigma) * v64) / sigma
    std = sigma_next * math.sin(eta * math.pi / 2)
    formulas = {
        FlowSde(eta): (
            x64 + dt * v64 + 0.5 * eta**2 * sigma / (1 - sigma) * dt * score_term,
            eta * math.sqrt(sigma / (1 - sigma) * -dt),
        ),
        DanceSde(eta): (
            x64 + dt * v64 + 0.5 * eta**2 * dt * (x64 - (1 - sigma) * x0) / sigma**2,
            eta * math.sqrt(-dt),
        ),
        Cps(eta): ((1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * x1, std),
    }
    for kernel, (mean, expected_std) in formulas.items():
        result = step(kernel, x, v, sigma, sigma_next)
        scale = max(1.0, float(mean.abs().max()))
        # fp32 against fp64.  The Flow coefficient divides by 1 - sigma, exact in fp32 for an fp32 sigma.
        assert float((result.mean.double() - mean).abs().max()) <= 6e-7 * scale
        close(result.std[0], [expected_std], 3e-7 * max(1.0, expected_std))
        close(result.g[0], [expected_std / math.sqrt(-dt)], 6e-7 * max(1.0, expected_std / math.sqrt(-dt)))


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_ddim_agrees_with_diffusers(eta, prediction):
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        prediction_type="epsilon" if prediction == "epsilon" else "v_prediction",
    )
    scheduler.set_timesteps(10)
    table = scheduler.alphas_cumprod.double()
    sigmas = ddpm_sigmas(table.tolist(), timesteps=scheduler.timesteps.tolist(), final_alpha_bar=float(table[0]))
    kernel = DdimEta(eta, prediction=prediction)
    for index, timestep in enumerate(scheduler.timesteps):
        x, v = latents(index)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(index))
        theirs = scheduler.step(v, timestep, x, eta=eta, variance_noise=noise, return_dict=False)[0]
        ours = kernel.sample(step(kernel, x, v, sigmas[index], sigmas[index + 1]), noise)
        # At t = 901 the latent is divided by sqrt(abar) = 0.13 on both sides, in fp32: 1e-6 relative.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-6)


# Raised inside diffusers, by numpy 2 on a torch tensor.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_dpm2_agrees_with_the_multistep_solver_of_diffusers():
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(8)
    sigmas = scheduler.sigmas
    x, _ = latents(0)
    theirs, ours, history = x, x, None
    for index, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(torch.sin(theirs) + theirs, timestep, theirs, return_dict=False)[0]
        transition = step(Dpm2(), ours, torch.sin(ours) + ours, sigmas[index], sigmas[index + 1], history=history)
        ours, history = transition.mean, transition.history
    # Eight steps; diffusers forms the coefficients in fp32, and lambda loses digits near sigma 1 there.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def test_dpm2_converges_with_order_two_and_euler_with_order_one():
    def error(kernel, num_steps):
        """On x0 ~ N(0, 1/4) the ODE scales x as the std of the marginal; sigma stays where lambda is finite."""
        sigmas = torch.linspace(0.95, 0.05, num_steps + 1)
        x, history = torch.tensor([[1.0]]), None
        for a, b in itertools.pairwise(sigmas):
            slope = (a - (1 - a) * 0.25) / (a**2 + (1 - a) ** 2 * 0.25)
            transition = step(kernel, x, slope * x, a, b, history=history)
            x, history = transition.mean, transition.history
        start, end = (math.sqrt(float(s**2 + (1 - s) ** 2 * 0.25)) for s in (sigmas[0], sigmas[-1]))
        return abs(float(x) - end / start)

    # Halving the step divides the error by 2 or by 4, up to the next order.
    assert error(EulerOde(), 20) / error(EulerOde(), 40) == pytest.approx(2, rel=0.15)
    assert error(Dpm2(), 20) / error(Dpm2(), 40) == pytest.approx(4, rel=0.25)


def test_dpm2_remembers_nothing_itself():
    kernel = Dpm2()
    x, v = latents(0)
    first = step(kernel, x, v, 1.0, 0.9)
    second = step(kernel, x, v, 0.9, 0.7, history=first.history)
    assert torch.equal(step(kernel, x, v, 0.9, 0.7, history=first.history).mean, second.mean)
    assert torch.equal(step(kernel, x, v, 1.0, 0.9).mean, first.mean)
    # After sigma = 1 and before sigma = 0 the step is first-order, which is Euler for a rectified flow.
    for result, pair in ((second, (0.9, 0.7)), (step(kernel, x, v, 0.3, 0.0, history=second.history), (0.3, 0.0))):
        torch.testing.assert_close(result.mean, step(EulerOde(), x, v, *pair).mean, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 4), (2, 3, 4, 4), (2, 3, 2, 4, 4), (2, 2, 3, 2, 2, 2)])
@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), Cps(), EulerOde(), Dpm2()], ids=lambda k: k.name)
def test_any_rank_and_a_sigma_per_row(kernel, shape):
    x, v = latents(0, shape)
    sigma, sigma_next = torch.tensor([0.8, 0.4]), torch.tensor([0.6, 0.1])
    both = kernel.transition(x, velocity=v, sigma=sigma, sigma_next=sigma_next, sigma_max=0.9)
    assert both.std.shape == both.g.shape == (2, *(1,) * (len(shape) - 1))
    for row in range(2):
        alone = step(kernel, x[row : row + 1], v[row : row + 1], sigma[row], sigma_next[row], sigma_max=0.9)
        assert torch.equal(both.mean[row : row + 1], alone.mean)
        assert torch.equal(both.std[row : row + 1], alone.std)


def test_the_log_prob_is_that_of_a_normal_distribution():
    kernel = FlowSde()
    x, v = latents(0)
    transition = step(kernel, x, v, 0.75, 0.6)
    x_next, _ = latents(1)
    expected = torch.distributions.Normal(transition.mean.double(), transition.std.double()).log_prob(x_next.double())
    # Values near 10, in fp32.
    torch.testing.assert_close(kernel.log_prob(x_next, transition).double(), expected.mean(dim=1), rtol=1e-6, atol=0)


def test_bf16_inputs_are_computed_in_fp32():
    x, v = (part.bfloat16() for part in latents(0))
    sigma = torch.full((3,), 0.75)
    result = FlowSde().transition(x, velocity=v, sigma=sigma, sigma_next=sigma - 0.1, sigma_max=0.9)
    assert result.mean.dtype == result.std.dtype == result.g.dtype == torch.float32
    assert torch.equal(result.mean, step(FlowSde(), x.float(), v.float(), 0.75, sigma[0] - 0.1).mean)


@pytest.mark.parametrize("kernel", [EulerOde(), Dpm2(), FlowSde(0.0), Cps(0.8)], ids=lambda k: k.name)
def test_a_deterministic_step_has_no_log_prob(kernel):
    x, v = latents(0)
    # CPS ends a schedule without noise; Flow-SDE with eta 0 is deterministic everywhere.
    transition = step(kernel, x, v, 0.5, 0.0)
    with pytest.raises(ValueError, match=f"'{kernel.name}'.*no density"):
        kernel.log_prob(x, transition)


def test_make_kernel_knows_six_names_and_their_options():
    names = {"flow-sde", "dance-sde", "cps", "ddim-eta", "euler", "dpm2"}
    assert {make_kernel(name).name for name in names} == names
    assert make_kernel("flow-sde", eta=0.5) == FlowSde(0.5)
    assert make_kernel("cps", eta=0.5, constants=False) == Cps(0.5, constants=False)
    assert make_kernel("euler", eta=0.0) == EulerOde()
    assert make_kernel("ddim-eta", prediction="v").is_stochastic


def test_make_kernel_refuses_what_it_cannot_honour():
    with pytest.raises(ValueError, match=r"choose one of flow-sde, dance-sde.*did you mean 'flow-sde'\?"):
        make_kernel("flow_sde")
    with pytest.raises(ValueError, match=r"'euler': eta = 0\.7, but it is deterministic"):
        make_kernel("euler", eta=0.7)
    with pytest.raises(ValueError, match=r"option .constant. is not known; its options are: constants"):
        make_kernel("cps", constant=True)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        make_kernel("cps", eta=1.2)
    with pytest.raises(ValueError, match="finite number >= 0"):
        make_kernel("flow-sde", eta=-0.1)


@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), Cps(), DdimEta(), EulerOde()], ids=lambda k: k.name)
def test_an_ode_step_does_not_broadcast(kernel):
    x, rows = torch.zeros(2, 4), torch.full((2,), 0.5)
    good = {"velocity": x, "sigma": rows, "sigma_next": rows / 2}
    for bad, message in (
        ({"velocity": torch.ones(1, 4)}, r"velocity has shape \[1, 4\], x has \[2, 4\]"),
        ({"sigma": rows[:1]}, r"sigma and sigma_next of shape \[2\]"),
        ({"sigma_next": torch.tensor(0.25)}, r"sigma and sigma_next of shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.ode_step(x, **{**good, **bad})


@pytest.mark.parametrize("kernel", [FlowSde(), Cps(constants=False)], ids=lambda k: k.name)
def test_neither_a_log_prob_nor_a_sample_broadcasts(kernel):
    transition = step(kernel, torch.zeros(2, 4), torch.ones(2, 4), 0.5, 0.25)
    for shape in ((1, 4), (4,), (2, 1), (2, 4, 1)):
        with pytest.raises(ValueError, match=rf"kernel '{kernel.name}': x_next has shape .*, the mean has \[2, 4\]"):
            kernel.log_prob(torch.zeros(shape), transition)
        with pytest.raises(ValueError, match=rf"kernel '{kernel.name}': noise has shape .*, the mean has \[2, 4\]"):
            kernel.sample(transition, torch.zeros(shape))


@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), DdimEta()], ids=lambda k: k.name)
def test_a_rising_sigma_has_no_log_prob(kernel):
    """Its std is the root of a negative number, or 0 where that is clamped."""
    transition = step(kernel, X, V, 0.5, 0.75)
    with pytest.raises(ValueError, match=rf"kernel '{kernel.name}': .*std = (nan|0)"):
        kernel.log_prob(torch.tensor([X]), transition)
    falling = step(kernel, X, V, 0.75, 0.5)
    for std in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"std = {std}.*sigma_next below sigma"):
            kernel.log_prob(torch.tensor([X]), dataclasses.replace(falling, std=torch.full((1, 1), std)))


def test_shapes_that_do_not_fit_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one per row"):
        FlowSde().transition(x, velocity=x, sigma=torch.ones(3), sigma_next=torch.zeros(3), sigma_max=0.9)
    with pytest.raises(ValueError, match="velocity has shape"):
        FlowSde().transition(x, velocity=x[:, :2], sigma=torch.ones(2), sigma_next=torch.zeros(2), sigma_max=0.9)


def test_a_schedule_is_checked_for_densities_before_its_steps_run_on_a_device():
    sigmas = static_sigmas(4, shift=3.0)
    FlowSde().check_density(sigmas, torch.tensor([0, 3]))
    Cps(0.8).check_density(sigmas, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="'cps': got a deterministic step"):
        Cps(0.8).check_density(sigmas, torch.tensor([2, 3]))
    with pytest.raises(ValueError, match="'euler': got a deterministic step"):
        EulerOde().check_density(sigmas, torch.tensor([0]))
