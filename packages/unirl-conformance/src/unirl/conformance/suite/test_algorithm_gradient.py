"""Algorithms that follow the gradient of rewards through the sampler."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.pixel_score import REWARD_WEIGHTS, PixelScore
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs
from unirl.conformance.fixtures.algorithm import ROUNDING, AlgorithmCase
from unirl.conformance.fixtures.training_setup import TrainingSetup, gradient_gap
from unirl.conformance.verdicts import NotApplicable
from unirl.numerics.diffusion.guidance import guided_velocity
from unirl.numerics.diffusion.sampler import guidance_of, kernel_of

SCORE = PixelScore(weights=REWARD_WEIGHTS)


@claim("algorithm")
def test_a_step_raises_the_reward(case: AlgorithmCase) -> None:
    """A small step against the gradient makes the same initial noise end in images of higher reward.

    If it fails: look for a `detach` between the velocity and the score, for rewards of the rollout in place of those of
    the decoded latents, and for a sign; the loss is minimised.
    """
    setup = _setup(case)
    track, fixed = setup.with_old_log_probs(), KeepsOldLogProbs(setup.algorithm)
    _, gradient = setup.train(track, algorithm=fixed)
    norm = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
    assert norm > 0, "the gradient is 0 although the reward depends on every pixel"
    before = _rewards_now(setup)
    setup.train(track, algorithm=fixed, lr=0.01 / norm)
    gained = float((_rewards_now(setup) - before).mean())
    case.record("mean reward gained", gained)
    # The step is 0.01 long: rewards of order 0.5 move by 1e-4 and more, of which fp32 keeps three digits.
    assert gained > 0, f"after a step of length 0.01 the mean reward changed by {gained:.3g}; it must rise"


@claim("algorithm")
def test_the_gradient_scales_with_the_reward(case: AlgorithmCase) -> None:
    """Rewards that are three times as large have a gradient three times as large: a reward's scale counts, and its
    weight.

    Tried with the default settings; a limit on the reward may cut some of it off.

    If it fails: look for rewards that are normalised, clipped or ranked before the gradient is taken.
    """
    once, thrice = (
        _gradient(_setup(case, score=PixelScore(weights=REWARD_WEIGHTS, factor=factor))) for factor in (1.0, 3.0)
    )
    expected = {name: 3.0 * value for name, value in once.items()}
    case.record("difference from three times the gradient", gradient_gap(thrice, expected), bound=ROUNDING)


def _setup(case: AlgorithmCase, *, score: PixelScore = SCORE) -> TrainingSetup:
    if case.needs().reward != "differentiable":
        raise NotApplicable(f"algorithm {case.spec.name!r} takes rewards as numbers, without their gradient")
    return case.setup(keeps_all=True, score=score)


def _gradient(setup: TrainingSetup) -> dict[str, Tensor]:
    return setup.gradient(setup.with_old_log_probs())


def _rewards_now(setup: TrainingSetup) -> Tensor:
    """[n] of images from the initial noise of the rollout, under the weights as they are now."""
    track = setup.track.to(setup.model.device)
    segment = track.latent
    kernel, guidance = kernel_of(segment.sampler), guidance_of(segment.sampler)
    assert not segment.sde_steps.numel() and int(segment.positions[0, 0]) == 0, "rollouts of the kit start at the noise"
    conditions = {branch: track.conditions[branch].expanded() for branch in guidance.branches}
    x, sigmas = segment.latents[:, 0], segment.sigmas.to(segment.latents.device)
    with torch.no_grad():
        for step in range(segment.num_steps):
            sigma, after = (sigmas[place].expand(len(x)) for place in (step, step + 1))
            v = guided_velocity(setup.model.velocity, x, sigma, conditions=conditions, guidance=guidance)  # type: ignore[union-attr]  # of a latent track
            x = kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=after)
        return SCORE(track, setup.model.decode(x)).cpu()  # type: ignore[union-attr]  # as above
