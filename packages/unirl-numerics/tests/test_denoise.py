"""The one loop: what it stores, what it leaves alone, and that it draws nothing itself."""

import itertools

import numpy as np
import pytest
import torch
from unirl.numerics.diffusion.denoise import all_positions, denoise
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import Cps, DanceSde, DdimEta, Dpm2, EulerOde, FlowSde
from unirl.numerics.diffusion.schedules import ddpm_sigmas, static_sigmas

NUM_STEPS = 6
SIGMAS = static_sigmas(NUM_STEPS, shift=3.0)
EVERYTHING = all_positions(5, num_steps=NUM_STEPS)
MIXED = np.array([[0, 1], [2, 3], [5, -1], [-1, -1], [0, 5]])


def roll(scene, *, kernel=None, sde_steps=MIXED, **changes):
    with torch.no_grad():
        return denoise(
            scene.velocity,
            scene.initial,
            sigmas=SIGMAS,
            kernel=kernel or FlowSde(),
            sde_steps=sde_steps,
            step_noise=scene.step_noise,
            **{"conditions": scene.branches, **changes},
        )


def no_steps(num_rows=5):
    return np.empty((num_rows, 0), dtype=np.int64)


def test_without_stochastic_steps_it_is_the_euler_ode(scene):
    scene = scene()
    x = scene.initial
    with torch.no_grad():
        for sigma, sigma_next in itertools.pairwise(SIGMAS):
            x = x + (sigma_next - sigma) * scene.velocity(x, sigma.expand(5), scene.conditions)
    for kernel in (FlowSde(), EulerOde(), DanceSde(0.0)):
        assert torch.equal(roll(scene, kernel=kernel, sde_steps=no_steps()).x, x)


def test_the_window_stores_the_two_ends_of_each_stochastic_step_and_the_last_latent(scene):
    result = roll(scene())
    expected = [[0, 1, 2, 6, -1], [2, 3, 4, 6, -1], [5, 6, -1, -1, -1], [6, -1, -1, -1, -1], [0, 1, 5, 6, -1]]
    assert [[p for p in row if p >= 0] for row in result.segment().positions.tolist()] == [
        [p for p in row if p >= 0] for row in expected
    ]
    assert result.segment().positions.shape == (5, 4)
    assert result.segment().latents.shape == (5, 4, 2, 4, 4)
    assert bool((result.segment().latents[result.segment().positions < 0] == 0).all())
    for row in range(5):
        slot = result.segment().positions[row].tolist().index(6)
        assert torch.equal(result.segment().latents[row, slot], result.x[row])


def test_kept_positions_of_each_row_come_back_without_any_scored_step(scene):
    scene = scene()
    full = roll(scene, keep=EVERYTHING)
    keep = np.array([[4, 1], [-1, 0], [6, 2], [-1, -1], [3, 3]])
    few = roll(scene, train_steps=no_steps(), keep=keep).segment()
    assert few.positions.tolist() == [[1, 4, 6], [0, 6, -1], [2, 6, -1], [6, -1, -1], [3, 6, -1]]
    assert few.log_probs.shape == (5, 0)
    for row in range(5):
        for slot, position in enumerate(few.positions[row].tolist()):
            if position >= 0:
                assert torch.equal(few.latents[row, slot], full.segment().latents[row, position])


def test_full_storage_holds_the_same_latents_as_the_window(scene):
    scene = scene()
    window, full = roll(scene), roll(scene, keep=EVERYTHING)
    assert full.segment().positions.tolist() == [list(range(NUM_STEPS + 1))] * 5
    assert torch.equal(full.segment().latents[:, 0], scene.initial)
    for row in range(5):
        for slot, position in enumerate(window.segment().positions[row].tolist()):
            if position >= 0:
                assert torch.equal(window.segment().latents[row, slot], full.segment().latents[row, position])
    assert torch.equal(window.x, full.x)
    assert torch.equal(window.segment().log_probs, full.segment().log_probs)


@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), Cps(0.6)], ids=lambda kernel: kernel.name)
def test_outside_its_steps_a_row_moves_as_the_ode_bit_for_bit(scene, kernel):
    scene = scene()
    steps = np.array([[0, 1], [2, 3], [4, -1], [-1, -1], [0, 4]])
    full = roll(scene, kernel=kernel, sde_steps=steps, keep=EVERYTHING)
    with torch.no_grad():
        for step in range(NUM_STEPS):
            x = full.segment().latents[:, step]
            v = scene.velocity(x, SIGMAS[step].expand(5), scene.conditions)
            euler = x + (SIGMAS[step + 1] - SIGMAS[step]) * v
            for row in range(5):
                is_euler = torch.equal(full.segment().latents[row, step + 1], euler[row])
                assert is_euler == (step not in steps[row])


def test_a_stochastic_step_is_the_kernels_with_the_given_noise(scene):
    scene = scene()
    kernel = FlowSde()
    full = roll(scene, kernel=kernel, keep=EVERYTHING, with_means=True)
    with torch.no_grad():
        for row, column, step in ((0, 0, 0), (1, 1, 3), (4, 1, 5)):
            x = full.segment().latents[:, step]
            transition = kernel.transition(
                x,
                velocity=scene.velocity(x, SIGMAS[step].expand(5), scene.conditions),
                sigma=SIGMAS[step].expand(5),
                sigma_next=SIGMAS[step + 1].expand(5),
                sigma_max=SIGMAS[1],
            )
            drawn = scene.step_noise(step, torch.arange(5))
            x_next = kernel.sample(transition, drawn)
            assert torch.equal(full.segment().latents[row, step + 1], x_next[row])
            assert torch.equal(full.segment().means[row, column], transition.mean[row])
            # The mean square of the noise decides the log-prob: -mean(e^2) / 2 - ln s - ln(2 pi) / 2, in fp32.
            expected = -drawn[row].square().mean() / 2 - transition.std[row].log().squeeze() - 0.9189385332
            torch.testing.assert_close(full.segment().log_probs[row, column], expected, rtol=0, atol=3e-6)
    assert bool((full.segment().log_probs[torch.as_tensor(MIXED) < 0] == 0).all())
    assert full.segment().log_probs.shape == (5, 2)


def test_a_row_does_not_depend_on_its_neighbours_steps(scene):
    """Rows are computed in one batch of the same size; only the other rows' steps differ."""
    scene = scene()
    result, alone = roll(scene), roll(scene, sde_steps=np.array([[0, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]))
    assert torch.equal(result.x[0], alone.x[0])
    assert torch.equal(result.segment().log_probs[0], alone.segment().log_probs[0])


def test_the_emitted_latent_is_rounded_before_it_is_scored(scene):
    scene = scene()
    kernel = FlowSde()
    result = roll(scene, kernel=kernel, storage_dtype=torch.bfloat16, keep=EVERYTHING)
    assert result.segment().latents.dtype == torch.bfloat16
    assert torch.equal(result.x, result.x.bfloat16().float())
    with torch.no_grad():
        x = result.segment().latents[:, 0].float()
        transition = kernel.transition(
            x,
            velocity=scene.velocity(x, SIGMAS[0].expand(5), scene.conditions),
            sigma=SIGMAS[0].expand(5),
            sigma_next=SIGMAS[1].expand(5),
            sigma_max=SIGMAS[1],
        )
    emitted = kernel.log_prob(result.segment().latents[:, 1].float(), transition)
    assert torch.equal(result.segment().log_probs[0, 0], emitted[0])


@pytest.mark.parametrize(
    ("guidance", "calls"),
    [
        (make_guidance("batched"), [5] * NUM_STEPS),
        (make_guidance("batched", scale=4.0), [10] * NUM_STEPS),
        (make_guidance("two-pass", scale=4.0), [5] * 2 * NUM_STEPS),
        (make_guidance("norm-corrected", scale=4.0), [5] * 2 * NUM_STEPS),
    ],
    ids=["none", "batched", "two-pass", "norm-corrected"],
)
def test_the_velocity_is_called_once_per_step_and_pass(scene, guidance, calls):
    scene = scene()
    roll(scene, guidance=guidance)
    assert scene.velocity.batch_sizes == calls
    assert len(calls) == NUM_STEPS * guidance.num_forwards


def test_noise_is_asked_for_exactly_once_per_stochastic_step_and_row(scene):
    scene, asked = scene(), []

    def step_noise(step, rows):
        asked.append((step, rows.tolist()))
        return scene.step_noise(step, rows)

    with torch.no_grad():
        denoise(
            scene.velocity,
            scene.initial,
            sigmas=SIGMAS,
            kernel=FlowSde(),
            sde_steps=MIXED,
            conditions=scene.branches,
            step_noise=step_noise,
        )
    assert asked == [(0, [0, 4]), (1, [0]), (2, [1]), (3, [1]), (5, [2, 4])]


def test_nothing_is_drawn_from_a_global_generator(scene):
    scene = scene()
    before = torch.get_rng_state()
    roll(scene)
    assert torch.equal(torch.get_rng_state(), before)


def test_dpm2_takes_every_step_and_differs_from_euler(scene):
    scene = scene()
    x, history = scene.initial, None
    with torch.no_grad():
        for step in range(NUM_STEPS):
            transition = Dpm2().transition(
                x,
                velocity=scene.velocity(x, SIGMAS[step].expand(5), scene.conditions),
                sigma=SIGMAS[step].expand(5),
                sigma_next=SIGMAS[step + 1].expand(5),
                sigma_max=SIGMAS[1],
                history=history,
            )
            x, history = transition.mean, transition.history
    result = roll(scene, kernel=Dpm2(), sde_steps=no_steps())
    assert torch.equal(result.x, x)
    assert not torch.equal(result.x, roll(scene, kernel=EulerOde(), sde_steps=no_steps()).x)


def test_ddim_walks_as_diffusers_does_where_it_is_not_stochastic():
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, prediction_type="epsilon")
    scheduler.set_timesteps(6)
    x = initial = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    drawn = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    for index, timestep in enumerate(scheduler.timesteps):
        eta = 1.0 if index == 2 else 0.0
        x = scheduler.step(torch.tanh(x), timestep, x, eta=eta, variance_noise=drawn, return_dict=False)[0]
    result = denoise(
        lambda latent, _sigma, _conditions: torch.tanh(latent),
        initial,
        sigmas=ddpm_sigmas(scheduler.alphas_cumprod.tolist(), timesteps=scheduler.timesteps.tolist()),
        kernel=DdimEta(1.0),
        sde_steps=np.array([[2], [2]]),
        conditions={"positive": {}},
        step_noise=lambda _step, _rows: drawn,
    )
    # Six fp32 steps that divide by sqrt(abar) from 0.1 up.
    torch.testing.assert_close(result.x, x, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 4, 4), (2, 3, 4, 4), (1, 2, 2, 4, 4)], ids=str)
def test_any_rank_of_latent(scene, shape):
    result = roll(scene(shape), with_means=True)
    assert result.segment().latents.shape == (5, 4, *shape)
    assert result.segment().means.shape == (5, 2, *shape)
    assert result.x.shape == (5, *shape)


def test_the_final_latent_carries_the_gradient_through_the_sampler_if_it_is_on(scene):
    scene = scene()
    result = denoise(
        scene.velocity,
        scene.initial,
        sigmas=SIGMAS,
        kernel=FlowSde(),
        sde_steps=MIXED,
        conditions=scene.branches,
        step_noise=scene.step_noise,
        with_means=True,
    )
    (gradient,) = torch.autograd.grad(result.x.sum(), [scene.velocity.out])
    assert float(gradient.abs().sum()) > 0
    assert not any(
        stored.requires_grad
        for stored in (result.segment().latents, result.segment().log_probs, result.segment().means)
    )
    assert torch.equal(result.x, roll(scene).x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": EulerOde()}, "kernel 'euler' is deterministic"),
        ({"kernel": FlowSde(0.0)}, "kernel 'flow-sde' is deterministic as configured"),
        ({"kernel": Cps()}, "no density"),  # step 5 ends at sigma 0
        ({"sde_steps": MIXED[:3]}, r"got shape \[3, 2\], expected \[5, S\]"),
        ({"sde_steps": MIXED + 1}, "from 0 to 6"),
        ({"sde_steps": MIXED[:, ::-1]}, r"row 0 is \[1, 0\]; steps must rise"),
        ({"keep": MIXED[:3]}, r"keep: got shape \[3, 2\], expected \[5, P\]"),
        ({"keep": MIXED + 2}, "keep: got positions from 1 to 7; they count from 0 to 6"),
        ({"guidance": make_guidance("batched", scale=2.0), "conditions": {"positive": {}}}, "'negative' is missing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(scene, changes, message):
    with pytest.raises(ValueError, match=message):
        roll(scene(), **changes)


def test_missing_noise_and_rising_sigmas_are_refused(scene):
    scene = scene()
    arguments = {"kernel": FlowSde(), "sde_steps": MIXED, "conditions": scene.branches}
    with pytest.raises(ValueError, match="step_noise is None"):
        denoise(scene.velocity, scene.initial, sigmas=SIGMAS, **arguments)
    with pytest.raises(ValueError, match="fall strictly"):
        denoise(scene.velocity, scene.initial, sigmas=SIGMAS.flip(0), step_noise=scene.step_noise, **arguments)
    with pytest.raises(ValueError, match=r"step_noise returned shape \[1\]"):
        denoise(scene.velocity, scene.initial, sigmas=SIGMAS, step_noise=lambda *_: torch.zeros(1), **arguments)
