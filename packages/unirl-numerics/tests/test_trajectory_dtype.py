"""Trajectories stored in 16 bits: the error of their log-probs by formula, their bytes, and what the request proves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.loop.costs import latent_step_cost
from unirl.numerics.diffusion.denoise import denoise, storage_dtype
from unirl.numerics.diffusion.kernels import Cps, DanceSde, FlowSde
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.diffusion.schedules import static_sigmas
from unirl.numerics.noise import INITIAL, noise, noise_digest

SIGMAS = static_sigmas(6, shift=3.0)
STEPS = (0, 2, 4)
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of rounding to nearest: half of the distance between neighbours, 8 and 11 significant bits."""
SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}
"""Largest absolute error among subnormal numbers."""


def roll(scene, name, *, kernel):
    sampling = LatentSamplingConfig(trajectory_dtype=name)
    with torch.no_grad():
        return denoise(
            scene.velocity,
            scene.initial,
            sigmas=SIGMAS,
            kernel=kernel,
            sde_steps=np.tile(STEPS, (5, 1)),
            conditions=scene.branches,
            step_noise=scene.step_noise,
            storage_dtype=storage_dtype(sampling),
        ).segment()


@pytest.mark.parametrize("kernel", [FlowSde(), DanceSde(), Cps(0.8)], ids=repr)
@pytest.mark.parametrize("name", ROUNDOFF)
def test_rounding_moves_a_log_prob_by_no_more_than_its_formula(scene, name, kernel):
    """A sample y = m + s z is stored as y + e with |e| <= u |y|. Per element its log-prob moves by
    -(2 s z e + e^2) / (2 s^2), so in the mean by at most mean(|z| |e| / s + e^2 / (2 s^2)); the constants of kernels
    that weigh log-probs by other factors cancel by taking s from the kernel."""
    scene = scene()
    segment = roll(scene, name, kernel=kernel)
    assert str(segment.latents.dtype) == f"torch.{name}"
    moved = 0.0
    for column, step in enumerate(STEPS):
        slot = segment.positions[0].tolist().index(step)
        x, stored = segment.latents[:, slot].float(), segment.latents[:, slot + 1].float()
        sigma, sigma_next = SIGMAS[step].expand(5), SIGMAS[step + 1].expand(5)
        with torch.no_grad():
            velocity = scene.velocity(x, sigma, scene.conditions)
            settings = {"sigma": sigma, "sigma_next": sigma_next, "sigma_max": SIGMAS[1]}
            transition = kernel.transition(x, velocity=velocity, **settings)
            drawn = scene.step_noise(step, torch.arange(5))
            exact = kernel.sample(transition, drawn)
        assert torch.equal(stored, exact.to(getattr(torch, name)).float()), "it is the sample, rounded"
        shift = kernel.log_prob(stored, transition) - kernel.log_prob(exact, transition)
        assert torch.equal(segment.log_probs[:, column], kernel.log_prob(stored, transition)), "of the stored sample"
        error = ROUNDOFF[name] * exact.abs() + SMALLEST[name]
        std = transition.std.view(-1, 1, 1, 1)
        bound = (drawn.abs() * error / std + error.square() / (2 * std.square())).flatten(1).mean(dim=1)
        # Each log-prob is a mean of 32 squares z^2 / 2 in fp32: 32 roundings of 2^-24 of their sum, which is below 64.
        assert bool((shift.abs() <= bound + 32 * 64 * 2.0**-24).all()), (shift, bound)
        moved = max(moved, float(shift.abs().max()))
    assert moved > 0, "something was rounded"


def plan_of(sde: SdeStepsConfig, name: str, *, trajectory="window") -> LatentRequest:
    return plan_latents(
        LatentSamplingConfig(num_inference_steps=6, sde=sde, trajectory_dtype=name),
        sigmas=SIGMAS,
        latent_shape=(2, 4, 4),
        seed=3,
        rollout=0,
        sample_ids=[f"s{row}" for row in range(5)],
        group_ids=["g"] * 5,
        trajectory=trajectory,
    )


@pytest.mark.parametrize("name", ["float32", *ROUNDOFF])
@pytest.mark.parametrize(
    ("sde", "trajectory", "positions"),
    [
        (SdeStepsConfig(mode="window", window=2), "window", 4),  # 0, 1, 2 and the end
        (SdeStepsConfig(), "window", 7),
        (SdeStepsConfig(mode="fixed", steps=[5]), "window", 2),
        (SdeStepsConfig(mode="fixed", steps=[5]), "full", 7),
        (SdeStepsConfig(mode="none"), "none", 1),
    ],
)
def test_only_what_is_trained_on_is_stored_and_its_bytes_are_the_formula(scene, name, sde, trajectory, positions):
    request = plan_of(sde, name, trajectory=trajectory)
    scene = scene()
    with torch.no_grad():
        segment = denoise(
            scene.velocity,
            scene.initial,
            sigmas=request.sigmas,
            kernel=FlowSde(),
            sde_steps=request.sde_steps,
            train_steps=request.train_steps,
            keep=request.keep,
            conditions=scene.branches,
            step_noise=scene.step_noise,
            storage_dtype=storage_dtype(request.sampling),
        ).segment()
    elements = 5 * positions * 2 * 4 * 4
    assert segment.latents.nbytes == elements * {"float32": 4, "bfloat16": 2, "float16": 2}[name]
    assert latent_step_cost(request, latent_shape=(2, 4, 4), replayed_share=0.0).stored_bytes == segment.latents.nbytes


@pytest.mark.parametrize("name", ROUNDOFF)
def test_the_digest_of_the_initial_noise_is_of_the_rounded_noise(name):
    request, exact = plan_of(SdeStepsConfig(), name), plan_of(SdeStepsConfig(), "float32")
    drawn = noise(seed=3, rollout=0, ids=request.noise_ids[:1], step=INITIAL, shape=(2, 4, 4))
    assert request.initial_noise[0] == noise_digest(drawn.to(getattr(torch, name)).float())[0]
    assert request.initial_noise[0] != exact.initial_noise[0]
