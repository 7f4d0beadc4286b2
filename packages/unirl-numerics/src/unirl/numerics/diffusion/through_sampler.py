"""Gradients through the sampler: the last steps of stored trajectories, recomputed so that the clean latents depend on
the weights.

Source: DRaFT, arXiv 2309.17400, algorithm 1; the options are those of AlignProp (arXiv 2310.03739), ReFL
(arXiv 2304.05977) and DRTune (arXiv 2405.00760).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from unirl.core.types.track import LatentSegment

from .kernels import Kernel, OneStepKernel
from .sampler import kernel_of
from .transition import History

if TYPE_CHECKING:
    from unirl.core.roles import Forward, Replayed
    from unirl.core.types.track import Track

__all__ = ["spread_steps", "through_sampler", "through_stored_inputs", "with_step_means"]

PointVelocity = Callable[[Tensor, Tensor], Tensor]
"""velocity(x [n, ...], sigma [n]) -> [n, ...] fp32: guided, with gradient. For `through_stored_inputs` also of k points
of each row at once, x [n, k, ...] with sigma [n, k]."""


def through_sampler(
    velocity: PointVelocity,
    segment: LatentSegment,
    *,
    first: int,
    last: int | None = None,
    gradient_steps: Collection[int] | None = None,
    detach_inputs: bool = False,
    checkpointed: bool = True,
) -> Tensor:
    """Clean latents of stored trajectories, with gradient: from the stored latent at position `first` on, by the
    segment's own kernel.  Returns [n, ...] fp32.

    Without change of the weights they equal the stored ones to fp32 rounding. Stochastic steps add their stored noise:
    what the stored latent is beyond the old policy's mean, `segment.means`.

    velocity: called once per step with the latents at it.  segment: stores the positions `first` and T, of a multistep
    kernel also `first - 1`, and of stochastic steps both ends.
    last: the step at which denoising stops: its velocity leads straight to the clean estimate, without noise (ReFL,
        DRTune). None is the last step of the schedule, which is then taken as any other.
    gradient_steps: the steps whose velocity has a gradient, none of the others; None is all from `first` to `last`.
    detach_inputs: the velocity sees its input as a constant, so the gradient has no product of Jacobians (DRTune).
    checkpointed: recompute the activations of each step in the backward pass, instead of keeping those of all.

    Raises ValueError for steps outside of the schedule, positions that are not stored, and stochastic steps without
    stored means.
    """
    stop, chosen = _range(segment, first, last, gradient_steps)
    steps = _Steps(segment, kernel_of(segment.sampler))
    history = steps.history(first, velocity)
    x = steps.stored(first)
    for step in range(first, stop + 1):
        v = _velocity(
            velocity,
            x.detach() if detach_inputs else x,
            steps.sigma(step),
            has_gradient=step in chosen,
            checkpointed=checkpointed,
        )
        if step == stop and last is not None:
            sigma = steps.sigma(step)
            return steps.kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=torch.zeros_like(sigma))
        x, history = steps.next(step, x, v, history)
    return x


def through_stored_inputs(
    velocity: PointVelocity,
    segment: LatentSegment,
    *,
    gradient_steps: Collection[int],
    last: int | None = None,
    stacked: bool = True,
    checkpointed: bool = True,
) -> Tensor:
    """Clean latents of stored trajectories, with the gradient of some steps' velocities at their stored inputs alone.

    Returns [n, ...] fp32: without change of the weights the stored ones to fp32 rounding, or the clean estimate at
    `last`. Their gradient is the sum over `gradient_steps` of d x0 / d v_k times d v_k, which has no product of
    Jacobians of the velocity. A one-step kernel is linear in latents and velocity, so the steps between need no
    forward: cost and memory grow with the number of gradient steps, not with their distance from the end. A multistep
    kernel goes step by step, by `through_sampler`.

    segment: stores both ends of each gradient step and the last latents; what it needs of stochastic steps, `last` and
    checkpointed as in `through_sampler`.
    stacked: one forward for all gradient steps, or one for each.

    Raises ValueError as `through_sampler` does.
    Source: DRTune, arXiv 2405.00760, whose velocities see their inputs without gradient.
    """
    first = min(gradient_steps, default=0)
    stop, chosen = _range(segment, first, last, gradient_steps)
    steps = _Steps(segment, kernel_of(segment.sampler))
    if not isinstance(steps.kernel, OneStepKernel):
        return through_sampler(
            velocity,
            segment,
            first=first,
            last=last,
            gradient_steps=chosen,
            detach_inputs=True,
            checkpointed=checkpointed,
        )
    velocities = steps.velocities(velocity, sorted(chosen), stacked=stacked, checkpointed=checkpointed)
    # How far the latents are from the stored ones, whose later velocities are constants.
    shift = torch.zeros_like(steps.stored(first))
    for step in range(first, stop + 1):
        if step == stop and last is not None:
            x, sigma = steps.stored(step), steps.sigma(step)
            v = velocities.get(step)
            if v is None:
                v = _velocity(velocity, x, sigma, has_gradient=False, checkpointed=checkpointed)
            return steps.kernel.ode_step(x + shift, velocity=v, sigma=sigma, sigma_next=torch.zeros_like(sigma))
        if step in velocities:
            x = steps.next(step, steps.stored(step) + shift, velocities[step], None)[0]
            shift = x - steps.stored(step + 1)
        else:
            shift = steps.next(step, shift, torch.zeros_like(shift), None, is_shift=True)[0]
    return steps.stored(stop + 1) + shift


def spread_steps(count: int, *, num_steps: int, offset: float) -> list[int]:
    """`count` of the steps 0 to num_steps - 1, evenly spaced: the floor of (j + offset) num_steps / count.

    offset: in [0, 1); drawn evenly, it gives every step the same chance.
    Source: DRTune, arXiv 2405.00760, its choice of training steps.
    """
    if not (1 <= count <= num_steps and 0 <= offset < 1):
        raise ValueError(
            f"spread_steps: got count {count} of {num_steps} steps with offset {offset}, expected 1 to {num_steps} and "
            "an offset in [0, 1)."
        )
    # The product may round up to the next whole number.
    return [min(int((number + offset) * num_steps / count), num_steps - 1) for number in range(count)]


def with_step_means(track: Track, forward: Forward, *, first: int) -> Track:
    """The track with the means of its stochastic steps from `first` on, which alone count as scored from then on.

    For `Algorithm.with_old_log_probs`: `through_sampler` then adds the noise of the rollout, wherever the weights have
    moved. The track as it is where there are no such steps.
    """
    segment = track.latent
    steps = segment.sde_steps.masked_fill(segment.sde_steps < first, segment.num_steps).sort(dim=1).values
    steps = steps[:, (steps < segment.num_steps).any(dim=0)]
    if not steps.shape[1]:
        return track
    steps = steps.masked_fill(steps == segment.num_steps, -1)
    segment = dataclasses.replace(segment, train_steps=steps, log_probs=None, means=None, reference_means=None)
    replayed = cast("Replayed", forward(dataclasses.replace(track, segment=segment)))
    return dataclasses.replace(track, segment=dataclasses.replace(segment, means=replayed.means.detach()))


def _range(
    segment: LatentSegment, first: int, last: int | None, gradient_steps: Collection[int] | None
) -> tuple[int, set[int]]:
    """The step that denoising stops at, and the steps with gradient."""
    end = segment.num_steps - 1
    stop = end if last is None else last
    chosen = set(range(first, stop + 1)) if gradient_steps is None else set(gradient_steps)
    if not 0 <= first <= stop <= end:
        raise ValueError(f"through_sampler: got steps {first} to {stop}, expected 0 <= first <= last <= {end}.")
    if not chosen or not chosen <= set(range(first, stop + 1)):
        raise ValueError(f"through_sampler: got gradient steps {sorted(chosen)}, expected some of {first} to {stop}.")
    return stop, chosen


def _velocity(velocity: PointVelocity, x: Tensor, sigma: Tensor, *, has_gradient: bool, checkpointed: bool) -> Tensor:
    if not has_gradient:
        with torch.no_grad():
            return velocity(x, sigma)
    if not (checkpointed and torch.is_grad_enabled()):
        return velocity(x, sigma)
    # Dropout is off while training and no noise is drawn, so there is no generator to restore.
    return cast(Any, checkpoint)(velocity, x, sigma, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class _Steps:
    """The steps of stored trajectories."""

    segment: LatentSegment
    kernel: Kernel

    def sigma(self, position: int) -> Tensor:
        """[n] fp32."""
        segment = self.segment
        return segment.sigmas[position].to(segment.latents.device, torch.float32).expand(segment.num_rows)

    def stored(self, position: int, rows: Tensor | None = None) -> Tensor:
        """[n, ...] fp32, the stored latents. rows: [n] bool, where they must be stored; elsewhere they mean nothing."""
        at = self.segment.positions == position
        missing = ~at.any(dim=1)
        missing = missing if rows is None else missing & rows.to(missing.device)
        if bool(missing.any()):
            row = int(missing.nonzero()[0])
            kept = [int(each) for each in self.segment.positions[row]]
            raise ValueError(
                f"through_sampler: row {row} stores positions {kept}, expected {position} among them. Ask the engine "
                "for the full trajectory."
            )
        slots = at.to(torch.int64).argmax(dim=1)
        return self.segment.latents[range(self.segment.num_rows), slots].detach().float()

    def history(self, first: int, velocity: PointVelocity) -> History | None:
        """State that a multistep kernel had before step `first`."""
        if not first or isinstance(self.kernel, OneStepKernel):
            return None
        x = self.stored(first - 1)
        with torch.no_grad():
            return self._transition(first - 1, x, velocity(x, self.sigma(first - 1)), None)[1]

    def velocities(
        self, velocity: PointVelocity, chosen: Sequence[int], *, stacked: bool, checkpointed: bool
    ) -> dict[int, Tensor]:
        """Step -> [n, ...], at the stored latents, with gradient."""
        settings = {"has_gradient": True, "checkpointed": checkpointed}
        if not stacked:
            return {each: _velocity(velocity, self.stored(each), self.sigma(each), **settings) for each in chosen}
        x, sigma = (torch.stack([of(each) for each in chosen], dim=1) for of in (self.stored, self.sigma))
        return dict(zip(chosen, _velocity(velocity, x, sigma, **settings).unbind(dim=1), strict=True))

    def next(
        self, step: int, x: Tensor, v: Tensor, history: History | None, *, is_shift: bool = False
    ) -> tuple[Tensor, History | None]:
        """The latents after a step, as `Walk.advance` takes it, and the kernel's state.

        is_shift: x and v are differences, so no noise is added.
        """
        columns = self.segment.sde_steps == step
        is_sde = columns.any(dim=1)
        sigma, sigma_next = self.sigma(step), self.sigma(step + 1)
        if self.kernel.is_stochastic and not bool(is_sde.any()):
            return self.kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=sigma_next), history
        mean, history = self._transition(step, x, v, history)
        if not self.kernel.is_stochastic:
            return mean, history
        mask = is_sde.to(x.device).view(-1, *(1,) * (x.ndim - 1))
        drawn = mean if is_shift else mean + torch.where(mask, self._noise(step, is_sde), 0.0)
        if bool(is_sde.all()):
            return drawn, history
        return torch.where(
            mask, drawn, self.kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=sigma_next)
        ), history

    def _transition(self, step: int, x: Tensor, v: Tensor, history: History | None) -> tuple[Tensor, History | None]:
        transition = self.kernel.transition(
            x,
            velocity=v,
            sigma=self.sigma(step),
            sigma_next=self.sigma(step + 1),
            sigma_max=self.segment.sigmas[1].to(x.device),
            history=history,
        )
        return transition.mean, transition.history

    def _noise(self, step: int, is_sde: Tensor) -> Tensor:
        """[n, ...]: std times the noise that these rows drew, the stored latent less the old policy's mean."""
        segment = self.segment
        columns = segment.scored_steps == step
        if segment.means is None or bool((is_sde & ~columns.any(dim=1)).any()):
            raise ValueError(
                f"through_sampler: step {step} is stochastic, and the old policy's means of it are not stored. Replay "
                "the segment first and keep its means, or sample with a deterministic kernel."
            )
        slots = columns.to(torch.int64).argmax(dim=1)
        means = segment.means[range(segment.num_rows), slots].detach().float()
        return self.stored(step + 1, is_sde) - means
