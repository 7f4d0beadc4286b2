"""Replay: ratio 1 against the rollout, stacked against serial, gradients where they belong."""

import numpy as np
import pytest
import torch
from unirl.numerics.diffusion.denoise import all_positions, denoise
from unirl.numerics.diffusion.guidance import NO_GUIDANCE, make_guidance
from unirl.numerics.diffusion.kernels import Cps, DanceSde, FlowSde
from unirl.numerics.diffusion.replay import replay
from unirl.numerics.diffusion.schedules import static_sigmas

NUM_STEPS = 6
SIGMAS = static_sigmas(NUM_STEPS, shift=3.0)
SHARED = np.tile([0, 2, 4], (5, 1))
MIXED = np.array([[0, 1, 4], [2, 3, -1], [4, -1, -1], [-1, -1, -1], [0, 3, 4]])
KERNELS = [FlowSde(), DanceSde(), Cps(0.8), Cps(0.8, constants=False)]


def roll(scene, *, kernel, sde_steps, guidance=NO_GUIDANCE, **changes):
    with torch.no_grad():
        return denoise(
            scene.velocity,
            scene.initial,
            sigmas=SIGMAS,
            kernel=kernel,
            sde_steps=sde_steps,
            conditions=scene.branches,
            guidance=guidance,
            step_noise=scene.step_noise,
            with_means=True,
            **changes,
        ).segment()


def replayed(scene, trajectory, *, kernel, guidance=NO_GUIDANCE, **changes):
    return replay(
        scene.velocity,
        latents=trajectory.latents,
        positions=trajectory.positions,
        sigmas=trajectory.sigmas,
        sde_steps=trajectory.sde_steps,
        kernel=kernel,
        conditions=scene.branches,
        guidance=guidance,
        **changes,
    )


@pytest.mark.parametrize("sde_steps", [SHARED, MIXED], ids=["shared", "per row"])
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("storage_dtype", [None, torch.bfloat16], ids=str)
def test_the_first_ratio_is_exactly_1_at_the_rollouts_batch_shape(scene, kernel, sde_steps, storage_dtype):
    scene = scene()
    trajectory = roll(scene, kernel=kernel, sde_steps=sde_steps, storage_dtype=storage_dtype)
    result = replayed(scene, trajectory, kernel=kernel, stacked=False)
    ratio = (result.log_probs.detach() - trajectory.log_probs).exp()
    assert float((ratio - 1).abs().max()) == 0.0
    assert torch.equal(result.means[result.valid], trajectory.means[result.valid])
    assert result.valid.tolist() == (sde_steps >= 0).tolist()


@pytest.mark.parametrize("mode", ["batched", "two-pass", "norm-corrected"])
def test_the_first_ratio_is_exactly_1_under_guidance(scene, mode):
    scene, guidance = scene(), make_guidance(mode, scale=4.5)
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=SHARED, guidance=guidance)
    result = replayed(scene, trajectory, kernel=FlowSde(), guidance=guidance, stacked=False)
    assert float(((result.log_probs.detach() - trajectory.log_probs).exp() - 1).abs().max()) == 0.0


@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 4, 4), (2, 3, 4, 4), (1, 2, 2, 4, 4)], ids=str)
@pytest.mark.parametrize("guidance", [NO_GUIDANCE, make_guidance("batched", scale=3.0)], ids=["plain", "guided"])
def test_stacked_and_serial_replay_agree(scene, shape, guidance):
    scene = scene(shape)
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=MIXED, guidance=guidance)
    stacked, serial = (
        replayed(scene, trajectory, kernel=FlowSde(), guidance=guidance, stacked=stacked) for stacked in (True, False)
    )
    for name in ("log_probs", "means", "std", "g", "next"):
        # Another batch size may sum a matrix product in another order: fp32 rounding at magnitude 3.
        torch.testing.assert_close(getattr(stacked, name), getattr(serial, name), rtol=1e-6, atol=1e-6)
    assert stacked.log_probs.shape == stacked.valid.shape == (5, 3)
    assert stacked.std.shape == stacked.g.shape == (5, 3, *(1,) * len(shape))
    assert stacked.means.shape == stacked.next.shape == (5, 3, *shape)


def test_the_velocity_is_called_once_stacked_and_once_per_column_serially(scene):
    scene, guidance = scene(), make_guidance("two-pass", scale=3.0)
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=MIXED)
    for stacked, how, calls in (
        (True, NO_GUIDANCE, [15]),
        (False, NO_GUIDANCE, [5, 5, 5]),
        (True, guidance, [15, 15]),
        (False, guidance, [5] * 6),
        (True, make_guidance("batched", scale=3.0), [30]),
    ):
        scene.velocity.batch_sizes.clear()
        replayed(scene, trajectory, kernel=FlowSde(), guidance=how, stacked=stacked)
        assert scene.velocity.batch_sizes == calls


def test_rows_can_be_replayed_apart(scene):
    scene = scene()
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=MIXED)
    whole = replayed(scene, trajectory, kernel=FlowSde(), stacked=False)
    rows = torch.tensor([4, 1])
    some = replay(
        scene.velocity,
        latents=trajectory.latents[rows],
        positions=trajectory.positions[rows],
        sigmas=SIGMAS,
        sde_steps=trajectory.sde_steps[rows],
        kernel=FlowSde(),
        conditions={"positive": {"text": scene.conditions["text"][rows]}},
        stacked=False,
    )
    # Two rows instead of five: another order of summation, fp32.
    torch.testing.assert_close(some.log_probs, whole.log_probs[rows], rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_log_density(scene):
    """Against autograd through torch's own Normal, in fp64."""
    scene = scene()
    kernel = FlowSde()
    trajectory = roll(scene, kernel=kernel, sde_steps=SHARED, keep=all_positions(5, num_steps=NUM_STEPS))
    result = replayed(scene, trajectory, kernel=kernel)
    (gradient,) = torch.autograd.grad(result.log_probs.sum(), [scene.velocity.out])

    scene.velocity.double()
    expected = torch.zeros(())
    for step in (0, 2, 4):
        x, x_next = trajectory.latents[:, step].double(), trajectory.latents[:, step + 1].double()
        sigma, sigma_next = SIGMAS[step].double(), SIGMAS[step + 1].double()
        text = {"text": scene.conditions["text"].double()}
        v = scene.velocity(x, sigma.expand(5), text)
        g2 = 0.49 * sigma / (1 - (SIGMAS[1].double() if step == 0 else sigma))
        dt = sigma_next - sigma
        mean = x + dt * v + 0.5 * g2 * dt * (x + (1 - sigma) * v) / sigma
        normal = torch.distributions.Normal(mean, (g2 * -dt).sqrt())
        expected = expected + normal.log_prob(x_next).flatten(1).mean(dim=1).sum()
    scene.velocity.out.grad = None
    (reference,) = torch.autograd.grad(expected, [scene.velocity.out])
    scene.velocity.float()
    # fp32 against fp64, through three steps that divide by s^2 = 0.1.
    torch.testing.assert_close(gradient, reference.float(), rtol=1e-4, atol=1e-6)


def test_padding_gets_no_gradient_and_a_log_prob_of_0(scene):
    scene = scene()
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=MIXED)
    result = replayed(scene, trajectory, kernel=FlowSde())
    assert bool((result.log_probs[~result.valid] == 0).all())
    assert bool(torch.isfinite(result.means).all())
    (gradient,) = torch.autograd.grad(result.log_probs[~result.valid].sum(), [scene.velocity.out])
    assert float(gradient.abs().max()) == 0.0


def test_a_step_that_was_not_stored_is_named(scene):
    scene = scene()
    trajectory = roll(scene, kernel=FlowSde(), sde_steps=SHARED)
    arguments = {"latents": trajectory.latents, "positions": trajectory.positions, "sigmas": SIGMAS}
    rest = {"kernel": FlowSde(), "conditions": scene.conditions}
    positions = trajectory.positions.clone()
    positions[1] = torch.where(positions[1] == 3, -1, positions[1])
    with pytest.raises(
        ValueError,
        match=r"row 1 has no stored latents for step 2: expected positions 2 and 3.*\[0, 1, 2, -1, 4, 5, 6\]",
    ):
        replay(scene.velocity, **{**arguments, "positions": positions}, sde_steps=trajectory.sde_steps, **rest)
    with pytest.raises(ValueError, match="stores no latents"):
        replay(
            scene.velocity,
            latents=trajectory.latents[:, :0],
            positions=trajectory.positions[:, :0],
            sigmas=SIGMAS,
            sde_steps=trajectory.sde_steps,
            **rest,
        )
    with pytest.raises(ValueError, match="no steps to replay"):
        replay(scene.velocity, **arguments, sde_steps=trajectory.sde_steps[:, :0], **rest)
