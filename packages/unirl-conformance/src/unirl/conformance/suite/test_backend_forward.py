"""What a backend lets a loss ask of the policy, besides the replay."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.surrogate import Surrogate
from unirl.conformance.fixtures.backend import BackendBench
from unirl.core.roles import Forward, Losses, Policy
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.sampler import kernel_of

STACKED_BOUND = 1e-5
"""Of velocities of order 1: one forward for all points and one for each differ by fp32 rounding of some 1e-7."""


@claim("backend")
def test_the_velocity_at_a_stored_point_is_that_of_the_replay(bench: BackendBench) -> None:
    """A loss that asks for the velocity at the stored points gets what the replay computed there, bit for bit, of every
    policy that is kept, with points stacked and one by one. It has a gradient for the live policy alone.

    If it fails: evaluate the model at the very sigma of each point, with the conditions of its row, inside the policy
    that is asked for; `unirl.numerics.train.track_replay.TrackReplay` does.
    """
    for training in bench.trainings:
        caps = bench.extras(training)
        answers: dict[str, Tensor] = {}
        for replay in ("stacked", "serial"):
            with bench.backend(training, *caps, train=TrainConfig(replay=replay)) as trainee:
                trainee.train(bench.track(0))
                asking = _Asking(("live", *trainee.policies))
                trainee.train(bench.track(1), algorithm=asking)
            for policy, gap in asking.gaps.items():
                bench.record(f"{training}, {replay}: gap of policy {policy!r} to its replay", gap, bound=0.0)
            assert asking.with_gradient == ["live"], f"{training}: policies with a gradient are {asking.with_gradient}"
            answers[replay] = asking.live
        gap = float((answers["stacked"] - answers["serial"]).abs().max())
        bench.record(f"{training}: gap of stacked to serial", gap, bound=STACKED_BOUND)


class _Asking(Surrogate):
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
