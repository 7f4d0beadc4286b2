"""Gradients through the sampler: values of the stored trajectory, gradients of closed forms and of a plain loop."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from unirl.numerics.diffusion.denoise import all_positions, denoise
from unirl.numerics.diffusion.guidance import guided_velocity
from unirl.numerics.diffusion.kernels import Cps, DanceSde, DdimEta, Dpm2, EulerOde, FlowSde
from unirl.numerics.diffusion.schedules import static_sigmas
from unirl.numerics.diffusion.through_sampler import through_sampler, through_stored_inputs

NUM_STEPS = 6
SIGMAS = static_sigmas(NUM_STEPS, shift=3.0)
NO_STEPS = np.zeros((5, 0), dtype=np.int64)
SHARED = np.tile([1, 3, 4], (5, 1))
MIXED = np.array([[0, 1, 4], [2, 3, -1], [4, -1, -1], [-1, -1, -1], [0, 3, 4]])
CASES = [
    (EulerOde(), NO_STEPS),
    (Dpm2(), NO_STEPS),
    (DdimEta(eta=0.0), NO_STEPS),
    *((kernel, steps) for kernel in (FlowSde(), DanceSde(), Cps(0.8), DdimEta()) for steps in (SHARED, MIXED)),
]
# A step repeats the rollout's arithmetic at its batch shape, but adds its stored noise as (x' - mean) + mean: at most
# two more roundings per step, 2**-23 of latents whose size stays below 10, which later steps carry on.
ROUNDING = NUM_STEPS * 2 * 2**-23 * 10


def rolled(velocity, initial, *, kernel, sde_steps, branches, step_noise=None):
    with torch.no_grad():
        walk = denoise(
            velocity,
            initial,
            sigmas=SIGMAS,
            kernel=kernel,
            sde_steps=sde_steps,
            conditions=branches,
            step_noise=step_noise,
            keep=all_positions(len(initial), num_steps=NUM_STEPS),
            with_means=True,
        )
    return walk.segment()


@pytest.mark.parametrize("first", [0, 2, 5])
@pytest.mark.parametrize(("kernel", "sde_steps"), CASES, ids=repr)
def test_unchanged_weights_give_the_stored_latents(scene, kernel, sde_steps, first):
    scene = scene()
    segment = rolled(
        scene.velocity,
        scene.initial,
        kernel=kernel,
        sde_steps=sde_steps,
        branches=scene.branches,
        step_noise=scene.step_noise,
    )
    scene.velocity.batch_sizes.clear()
    result = through_sampler(lambda x, s: scene.velocity(x, s, scene.conditions), segment, first=first)
    torch.testing.assert_close(result.detach(), segment.final, rtol=0, atol=ROUNDING)
    # One forward a step, and one more for the state of a multistep kernel.
    assert len(scene.velocity.batch_sizes) == NUM_STEPS - first + (isinstance(kernel, Dpm2) and first > 0)


@pytest.mark.parametrize(("kernel", "sde_steps"), CASES, ids=repr)
def test_the_gradient_is_that_of_the_sampler_run_with_gradient(scene, kernel, sde_steps):
    """`denoise` under autograd, from the initial noise and with its noise, is another way to the same function."""
    scene = scene()
    parts = {"kernel": kernel, "sde_steps": sde_steps, "branches": scene.branches, "step_noise": scene.step_noise}
    segment = rolled(scene.velocity, scene.initial, **parts)
    weights = [scene.velocity.into, scene.velocity.out]
    result = through_sampler(lambda x, s: scene.velocity(x, s, scene.conditions), segment, first=0)
    walk = denoise(
        scene.velocity,
        scene.initial,
        sigmas=SIGMAS,
        kernel=kernel,
        sde_steps=sde_steps,
        conditions=scene.branches,
        step_noise=scene.step_noise,
    )
    result, expected = (torch.autograd.grad(x.square().sum(), weights) for x in (result, walk.x))
    for one, other in zip(result, expected, strict=True):
        # Both sum the same products; the latents differ by `ROUNDING`, which a few steps multiply.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


class Linear:
    """v = w x for one number per row, so that every step multiplies by a known factor of w."""

    def __init__(self, w=-0.4):
        self.w = torch.tensor(w, requires_grad=True)
        self.x = torch.linspace(-1.5, 2.0, 5)[:, None]
        self.segment = rolled(
            lambda x, sigma, conditions: self.w * x,
            self.x,
            kernel=EulerOde(),
            sde_steps=NO_STEPS,
            branches={"positive": {}},
        )

    def slope(self, **settings):
        result = through_sampler(lambda x, sigma: self.w * x, self.segment, **settings)
        return result.detach(), torch.autograd.grad(result.sum(), self.w)[0].item()


DT = np.diff(SIGMAS.double().numpy())


@pytest.mark.parametrize("first", range(NUM_STEPS))
def test_the_last_steps_of_a_linear_field_have_the_slope_of_their_product(first):
    """x_T = x_first prod(1 + dt_k w), so d/dw = x_T sum(dt_k / (1 + dt_k w))."""
    linear = Linear()
    factors = 1 + DT[first:] * -0.4
    expected = float(linear.segment.final.sum()) * (DT[first:] / factors).sum()
    # Six fp32 steps of 6e-8 each, summed over rows that partly cancel.
    assert linear.slope(first=first)[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("chosen", [(5,), (0, 5), (0, 2, 4), tuple(range(6))])
def test_detached_inputs_give_the_sum_of_each_steps_own_slope(chosen):
    """DRTune: d x_T = sum over the chosen steps of dt_k d v(sg(x_k)), here dt_k x_k."""
    linear = Linear()
    stored = linear.segment.latents[:, :, 0].double().numpy()
    expected = sum(DT[k] * stored[:, k].sum() for k in chosen)
    x, slope = linear.slope(first=0, gradient_steps=chosen, detach_inputs=True)
    assert slope == pytest.approx(expected, rel=1e-5)  # as above
    torch.testing.assert_close(x, linear.segment.final, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("last", [None, 4])
@pytest.mark.parametrize(("kernel", "sde_steps"), CASES, ids=repr)
def test_stored_inputs_give_the_slope_of_detached_ones_at_as_many_forwards_as_steps(scene, kernel, sde_steps, last):
    """Without the steps in between: `through_sampler` takes every one of them."""
    scene, chosen = scene(), (1, 4)
    segment = rolled(
        scene.velocity,
        scene.initial,
        kernel=kernel,
        sde_steps=sde_steps,
        branches=scene.branches,
        step_noise=scene.step_noise,
    )

    def velocity(x, sigma):
        conditions = {key: value.repeat_interleave(sigma[0].numel(), dim=0) for key, value in scene.conditions.items()}
        return scene.velocity(x.reshape(-1, *segment.final.shape[1:]), sigma.flatten(), conditions).view_as(x)

    weights, settings = [scene.velocity.into, scene.velocity.out], {"gradient_steps": chosen, "last": last}
    whole = through_sampler(velocity, segment, first=1, detach_inputs=True, **settings)
    expected = torch.autograd.grad(whole.square().sum(), weights)
    for stacked in (True, False):
        scene.velocity.batch_sizes.clear()
        result = through_stored_inputs(velocity, segment, stacked=stacked, checkpointed=False, **settings)
        if not isinstance(kernel, Dpm2):
            assert scene.velocity.batch_sizes == ([10] if stacked else [5, 5])
        torch.testing.assert_close(result, whole, rtol=0, atol=2 * ROUNDING)
        for one, other in zip(torch.autograd.grad(result.square().sum(), weights), expected, strict=True):
            # Sums of the same products in another order; stacked forwards round differently.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_moved_weights_move_the_clean_latents_by_the_steps_with_gradient_alone():
    """x_T + sum over the chosen steps of dt_k (w - w_old) x_k, on v = w x by Euler: the stored inputs stay."""
    linear, after, chosen = Linear(), 0.3, (0, 3)
    result = through_stored_inputs(lambda x, sigma: after * x, linear.segment, gradient_steps=chosen, stacked=False)
    stored = linear.segment.latents.double()
    expected = stored[:, -1] + sum(DT[k] * (after + 0.4) * stored[:, k] for k in chosen)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)  # fp32 of order 1


def test_slopes_with_detached_inputs_add_up_over_disjoint_steps():
    linear = Linear()
    parts = [linear.slope(first=0, gradient_steps=each, detach_inputs=True)[1] for each in ((0, 3), (1, 2, 4, 5))]
    assert sum(parts) == pytest.approx(linear.slope(first=0, detach_inputs=True)[1], rel=1e-5)  # as above


@pytest.mark.parametrize("step", [0, 3, 5])
def test_an_early_stop_jumps_to_the_clean_estimate(step):
    """ReFL: x0 = x_k - sigma_k w x_k, so d/dw = -sigma_k x_k."""
    linear = Linear()
    stored, sigma = linear.segment.latents[:, step], float(SIGMAS[step])
    x, slope = linear.slope(first=step, last=step)
    torch.testing.assert_close(x, stored * (1 + 0.4 * sigma), rtol=1e-6, atol=1e-6)  # two fp32 operations
    assert slope == pytest.approx(-sigma * float(stored.sum()), rel=1e-5)


def test_a_stop_at_a_stochastic_last_step_has_no_noise():
    """ReFL's x0 = x_k - sigma_k v, v = w x: nothing of the step that the rollout took from there."""
    segment = rolled(
        lambda x, sigma, conditions: -0.4 * x,
        torch.linspace(-1.5, 2.0, 5)[:, None],
        kernel=FlowSde(),
        sde_steps=np.tile([5], (5, 1)),
        branches={"positive": {}},
        step_noise=lambda step, rows: torch.ones(5, 1)[rows],
    )
    x = through_sampler(lambda x, sigma: -0.4 * x, dataclasses.replace(segment, means=None), first=5, last=5)
    stored = segment.latents[:, 5]
    torch.testing.assert_close(x, stored * (1 + 0.4 * float(SIGMAS[5])), rtol=1e-6, atol=1e-6)  # two fp32 operations


def test_a_stochastic_step_keeps_its_noise_when_the_weights_have_moved():
    """Flow-SDE on v = w x in closed form: x' = x + dt (w x + g^2 / (2 s) (x + (1 - s) w x)) + g sqrt(-dt) e."""
    kernel, steps, before, after = FlowSde(eta=0.5), np.tile([4], (5, 1)), -0.4, 0.3
    noise = torch.linspace(-1.0, 1.0, 5)[:, None]
    segment = rolled(
        lambda x, sigma, conditions: before * x,
        torch.linspace(-1.5, 2.0, 5)[:, None],
        kernel=kernel,
        sde_steps=steps,
        branches={"positive": {}},
        step_noise=lambda step, rows: noise[rows],
    )
    w = torch.tensor(after, requires_grad=True)
    result = through_sampler(lambda x, sigma: w * x, segment, first=4)
    x, s, dt = segment.latents[:, 4].double(), float(SIGMAS[4]), float(DT[4])
    g = 0.5 * math.sqrt(s / (1 - s))
    step = x * (1 + dt * (after + g**2 / (2 * s) * (1 + (1 - s) * after))) + g * math.sqrt(-dt) * noise.double()
    last = 1 + float(DT[5]) * after
    torch.testing.assert_close(result.detach().double(), step * last, rtol=1e-5, atol=1e-6)  # fp32 of order 1
    slope = (x * dt * (1 + g**2 / (2 * s) * (1 - s)) * last + step * float(DT[5])).sum()
    assert torch.autograd.grad(result.sum(), w)[0].item() == pytest.approx(float(slope), rel=1e-5)


def test_checkpoints_keep_the_activations_of_one_step(scene):
    scene = scene()
    segment = rolled(scene.velocity, scene.initial, kernel=EulerOde(), sde_steps=NO_STEPS, branches=scene.branches)
    calls: list[int] = []

    def kept(first, **settings):
        """Bytes that autograd keeps between forward and backward, and the gradient."""
        calls.clear()

        def pack(tensor):
            calls.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = through_sampler(
                lambda x, s: guided_velocity(scene.velocity, x, s, conditions=scene.branches),
                segment,
                first=first,
                **settings,
            )
        size = sum(calls)
        return size, torch.autograd.grad(result.sum(), [scene.velocity.into])[0]

    plain, checkpointed = ([kept(first, checkpointed=on) for first in (5, 0)] for on in (False, True))
    for (_, one), (_, other) in zip(plain, checkpointed, strict=True):
        assert torch.equal(one, other)
    latent = segment.final.nbytes
    # One step more keeps the activations of the network without checkpoints, and the latents at it with them: the input
    # of the velocity and those that the kernel's products need, with their sigmas.
    assert (checkpointed[1][0] - checkpointed[0][0]) <= 5 * 4 * latent < plain[1][0] - plain[0][0]


def test_what_stored_inputs_keep_grows_with_their_number_and_not_with_their_depth(scene):
    """DRTune's claim, in bytes that autograd saves for the backward pass, without checkpoints."""
    scene = scene()
    segment = rolled(scene.velocity, scene.initial, kernel=EulerOde(), sde_steps=NO_STEPS, branches=scene.branches)

    def kept(function, **settings):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            function(lambda x, s: scene.velocity(x, s, scene.conditions), segment, checkpointed=False, **settings)
        return sum(sizes)

    one, late, early = (
        kept(through_stored_inputs, gradient_steps=steps, stacked=False) for steps in ((5,), (4, 5), (0, 1))
    )
    # Each step on the way multiplies the shift of the latents by the kernel's number, which is kept: [n] fp32.
    number = 4 * segment.num_rows
    assert late - 2 * one == number and early - late == 4 * number and number < one / 100
    # Through the inputs, the whole way is kept.
    assert kept(through_sampler, first=0) > 5 * one


def test_what_cannot_be_recomputed_is_refused(scene):
    scene = scene()
    stochastic = rolled(
        scene.velocity,
        scene.initial,
        kernel=FlowSde(),
        sde_steps=SHARED,
        branches=scene.branches,
        step_noise=scene.step_noise,
    )

    def run(segment, **settings):
        through_sampler(lambda x, s: scene.velocity(x, s, scene.conditions), segment, **settings)

    with pytest.raises(ValueError, match="got steps 0 to 6, expected 0 <= first <= last <= 5"):
        run(stochastic, first=0, last=6)
    with pytest.raises(ValueError, match=r"got gradient steps \[1\], expected some of 2 to 5"):
        run(stochastic, first=2, gradient_steps=[1])
    with pytest.raises(ValueError, match="step 1 is stochastic, and the old policy's means of it are not stored"):
        run(dataclasses.replace(stochastic, means=None), first=0)
    scarce = dataclasses.replace(stochastic, latents=stochastic.latents[:, 4:], positions=stochastic.positions[:, 4:])
    with pytest.raises(ValueError, match=r"row 0 stores positions \[4, 5, 6\], expected 2 among them"):
        run(scarce, first=2)
