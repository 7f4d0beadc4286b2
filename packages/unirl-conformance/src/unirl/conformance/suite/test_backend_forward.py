"""Questions of a loss to the policy, besides the replay: velocities and decoded samples."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import PlainTraining, plain_of
from unirl.conformance.doubles.ppo import PPO
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase
from unirl.core.roles import Forward, Losses, LossTerm, Policy
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.sampler import kernel_of
from unirl.numerics.diffusion.through_sampler import through_sampler

STACKED_BOUND = 1e-5
"""Bound for velocities of order 1: one forward for all points and one for each differ by fp32 rounding of some 1e-7."""


@claim("backend")
def test_the_velocity_at_a_stored_point_is_that_of_the_replay(case: BackendCase) -> None:
    """A loss that asks for the velocity at the stored points gets what the replay computed there, bit for bit, of every
    policy that is kept, with points stacked and one by one. It has a gradient for the live policy alone.

    If it fails: evaluate the model at the very sigma of each point, with the conditions of its row, inside the policy
    that is asked for; `unirl.numerics.train.track_replay.TrackReplay` does.
    """
    for training in case.trainings:
        caps = case.extras(training)
        answers: dict[str, Tensor] = {}
        for replay in ("stacked", "serial"):
            with case.backend(training, *caps, train=TrainConfig(replay=replay)) as trainer:
                trainer.train(case.track(0))
                asking = _Asking(("live", *trainer.policies))
                trainer.train(case.track(1), algorithm=asking)
            for policy, gap in asking.gaps.items():
                case.record(f"{training}, {replay}: gap of policy {policy!r} to its replay", gap, bound=0.0)
            assert asking.with_gradient == ["live"], f"{training}: policies with a gradient are {asking.with_gradient}"
            answers[replay] = asking.live
        gap = float((answers["stacked"] - answers["serial"]).abs().max())
        case.record(f"{training}: gap of stacked to serial", gap, bound=STACKED_BOUND)


@claim("backend", proves=Cap.THROUGH_SAMPLER)
def test_the_gradient_goes_through_the_sampler(case: BackendCase) -> None:
    """A loss of the decoded samples has the gradient of a plain loop over the last three steps, in one graph of three
    forwards: through the weights and through the latents between them, with checkpoints and without.

    If it fails: look for a `detach` or `no_grad` around the velocity or the decoder, for weights that are freed or
    changed between the forwards of one loss, and for gradients that only the last of them leaves.
    """
    for training in case.trainings:
        for checkpointed in (True, False):
            with case.backend(training, **GRADIENT) as trainer:
                before, plain = trainer.trained(), plain_of(trainer, **GRADIENT)
                track = case.deterministic_track()
                trainer.train(track, _ThroughSampler(checkpointed=checkpointed))
                with torch.enable_grad():
                    plain.descend(brightness(trainer.denoiser.decode(_euler(plain, track))).neg().mean())
                result = trainer.trained()
                moved = largest_gap(before, plain.weights)
                assert moved > 0, "the loss has no gradient; this is a defect of the kit"
            how = "checkpoints" if checkpointed else "no checkpoints"
            case.record(
                f"{training}, {how}: relative gap of the change",
                largest_gap(result, plain.weights) / moved,
                bound=GRADIENT_BOUND,
            )


LAST = 3
"""Steps that the gradient goes through."""
GRADIENT_BOUND = 1e-4
"""Relative to the largest change of a weight: three forwards and backwards of fp32, whose sums of a hundred products
differ by 1e-6 of their largest addend where their order does. A gradient that is cut between the steps misses 5 % and
more."""


def brightness(images: Tensor) -> Tensor:
    """[n], of images [n, 3, H, W]."""
    return images.square().flatten(1).mean(dim=1)


def _euler(plain: PlainTraining, track: Track) -> Tensor:
    """Clean latents by Euler's rule from the stored latents before the last steps, written out."""
    segment, velocity = track.latent, plain.velocity()
    conditions = track.conditions["positive"].expanded()
    first = segment.num_steps - LAST
    x = segment.latents[:, segment.positions[0].tolist().index(first)]
    for sigma, after in itertools.pairwise(segment.sigmas[first:].tolist()):
        x = x + (after - sigma) * velocity(x, torch.full((len(x),), sigma), conditions)
    return x


class _ThroughSampler(PPO):
    """Makes the decoded samples brighter."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self._checkpointed = checkpointed

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return track

    def loss_weights(self, track: Track) -> dict[str, Tensor]:
        return {"brightness": track.sample_weights}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        latents = through_sampler(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            first=track.latent.num_steps - LAST,
            checkpointed=self._checkpointed,
        )
        values = -brightness(forward.decode(track, latents))
        return Losses(terms=[LossTerm(name="brightness", values=values, weights=track.sample_weights)])


class _Asking(PPO):
    """Compares the velocity at the stored points with the means of the replay, for each policy."""

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        super().__init__()
        self._policies = policies
        self.gaps: dict[Policy, float] = {}
        self.with_gradient: list[Policy] = []
        self.live = torch.zeros(())

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        segment = track.latent
        steps = segment.sde_steps
        rows = torch.arange(track.num_rows)[:, None]
        slots = (segment.positions[:, None, :] == steps[:, :, None]).int().argmax(dim=2)
        x = segment.latents[rows, slots]
        sigmas = segment.sigmas.to(x.device)
        sigma, sigma_next = sigmas[steps], sigmas[steps + 1]
        for policy in self._policies:
            velocity = forward.velocity(track, x, sigma, policy=policy, guided=True)
            with torch.no_grad():
                self._check_under_no_grad(forward, track, x, sigma, policy)
                step = kernel_of(segment.sampler).transition(
                    x.flatten(0, 1),
                    velocity=velocity.flatten(0, 1),
                    sigma=sigma.flatten(),
                    sigma_next=sigma_next.flatten(),
                    sigma_max=sigmas[1],
                )
                means = forward(track, policy=policy).means  # type: ignore[union-attr]  # of a latent track
            self.gaps[policy] = float((step.mean - means.flatten(0, 1)).abs().max())
            if velocity.requires_grad:
                self.with_gradient.append(policy)
            if policy == "live":
                self.live = velocity.detach()
        return super().loss(track, forward, progress=progress)

    @staticmethod
    def _check_under_no_grad(forward: Forward, track: Track, x: Tensor, sigma: Tensor, policy: Policy) -> None:
        one = forward.velocity(track, x[:, 0], sigma[:, 0], policy=policy)
        assert not one.requires_grad, f"policy {policy!r}: a velocity under no_grad has a gradient"
        assert one.shape == x[:, 0].shape, f"policy {policy!r}: got {one.shape} for points {x[:, 0].shape}"
