"""Gradients through the sampler: the last steps of stored trajectories, recomputed so that the clean latents depend on
the weights.

Source: DRaFT, arXiv 2309.17400, algorithm 1; the options are those of AlignProp (arXiv 2310.03739), ReFL
(arXiv 2304.05977) and DRTune (arXiv 2405.00760).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from unirl.core.types.track import LatentSegment

from .kernels import History, Kernel, OneStepKernel
from .sampler import kernel_of

if TYPE_CHECKING:
    from unirl.core.roles import Forward, Replayed
    from unirl.core.types.track import Track

__all__ = ["through_sampler", "with_step_means"]

PointVelocity = Callable[[Tensor, Tensor], Tensor]
"""velocity(x [n, ...], sigma [n]) -> [n, ...] fp32: guided, with gradient."""


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
    last: the step at which denoising stops early: its velocity leads straight to the clean estimate (ReFL, DRTune).
        None is the last step of the schedule, which is then taken as any other.
    gradient_steps: the steps whose velocity has a gradient, none of the others; None is all from `first` to `last`.
    detach_inputs: the velocity sees its input as a constant, so the gradient has no product of Jacobians (DRTune).
    checkpointed: recompute the activations of each step in the backward pass, instead of keeping those of all.

    Raises ValueError for steps outside of the schedule, positions that are not stored, and stochastic steps without
    stored means.
    """
    end = segment.num_steps - 1
    stop = end if last is None else last
    chosen = set(range(first, stop + 1)) if gradient_steps is None else set(gradient_steps)
    if not 0 <= first <= stop <= end:
        raise ValueError(f"through_sampler: got steps {first} to {stop}, expected 0 <= first <= last <= {end}.")
    if not chosen or not chosen <= set(range(first, stop + 1)):
        raise ValueError(f"through_sampler: got gradient steps {sorted(chosen)}, expected some of {first} to {stop}.")
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
        if step == stop < end:
            sigma = steps.sigma(step)
            return steps.kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=torch.zeros_like(sigma))
        x, history = steps.next(step, x, v, history)
    return x


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

    def next(self, step: int, x: Tensor, v: Tensor, history: History | None) -> tuple[Tensor, History | None]:
        """The latents after a step, as `Walk.advance` takes it, and the kernel's state."""
        columns = self.segment.sde_steps == step
        is_sde = columns.any(dim=1)
        sigma, sigma_next = self.sigma(step), self.sigma(step + 1)
        if self.kernel.is_stochastic and not bool(is_sde.any()):
            return self.kernel.ode_step(x, velocity=v, sigma=sigma, sigma_next=sigma_next), history
        mean, history = self._transition(step, x, v, history)
        if not self.kernel.is_stochastic:
            return mean, history
        mask = is_sde.to(x.device).view(-1, *(1,) * (x.ndim - 1))
        drawn = mean + torch.where(mask, self._noise(step, is_sde), 0.0)
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
