"""Recompute the stochastic transitions of a stored trajectory under the current weights, with gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.core.roles import Replayed
from unirl.core.types.array import Ragged
from unirl.core.types.batch import join
from unirl.core.types.track import LatentSegment, Track
from unirl.numerics.diffusion.denoise import check_sde_steps, check_sigmas
from unirl.numerics.diffusion.guidance import NO_GUIDANCE, Branches, Conditions, Guidance, Velocity, guided_velocity
from unirl.numerics.diffusion.kernels import Kernel
from unirl.numerics.diffusion.sampler import kernel_of
from unirl.numerics.diffusion.transition import Transition


def replay(
    velocity: Velocity,
    *,
    latents: Tensor,
    positions: Tensor,
    sigmas: Tensor,
    sde_steps: Tensor,
    kernel: Kernel,
    conditions: Branches,
    guidance: Guidance = NO_GUIDANCE,
    stacked: bool = True,
    only_positive: bool = False,
    means: Tensor | None = None,
) -> Replayed:
    """Recompute the log-probs of the stored steps.

    latents [n, K, ...], positions [n, K], sigmas [T + 1], sde_steps [n, S]: of a `LatentSegment`, any subset of
        its rows; where it has `train_steps`, these.  conditions: of each branch of the guidance, an entry per row.
    stacked: one forward of n * S rows, or one forward of n rows per column.  The results agree to fp32
    rounding; with False and the rollout's batch they repeat the rollout's arithmetic exactly.
    only_positive: see `guided_velocity`.
    means: [n, S, ...] of the steps, if known: the velocity is then not called.

    Calls `guided_velocity` 1 (stacked) or S times, also for padding: ranks that replay
    together must call it equally often.

    Raises ValueError when a step's latents are not stored, naming the row and the step.
    """
    stored = _StoredSteps.of(latents=latents, positions=positions, sigmas=sigmas, steps=sde_steps)
    x, x_next, sigma, sigma_next, valid = stored.x, stored.x_next, stored.sigma, stored.sigma_next, stored.valid
    sigmas = sigmas.to(device=latents.device, dtype=torch.float32)

    def transition_of(columns: slice) -> tuple[Transition, Tensor]:
        """A block of n rows for each column, concatenated."""
        block = x[:, columns].transpose(0, 1).flatten(0, 1)
        block_sigma = sigma[:, columns].T.flatten()
        if means is None:
            v = _block_velocity(
                velocity,
                block,
                block_sigma,
                columns=columns.stop - columns.start,
                conditions=conditions,
                guidance=guidance,
                only_positive=only_positive,
            )
        else:
            v = torch.zeros_like(block)
        step = kernel.transition(
            block,
            velocity=v,
            sigma=block_sigma,
            sigma_next=sigma_next[:, columns].T.flatten(),
            sigma_max=sigmas[1],
        )
        if means is not None:
            step = dataclasses.replace(step, mean=means[:, columns].transpose(0, 1).flatten(0, 1))
        return step, kernel.log_prob(x_next[:, columns].transpose(0, 1).flatten(0, 1), step)

    num_columns = sde_steps.shape[1]
    parts = [transition_of(group) for group in _groups(num_columns, stacked=stacked)]

    def in_rows(blocks: list[Tensor]) -> Tensor:
        joined = torch.cat(blocks)
        return joined.view(num_columns, -1, *joined.shape[1:]).transpose(0, 1)

    log_probs = in_rows([log_prob for _, log_prob in parts])
    return Replayed(
        log_probs=torch.where(valid, log_probs, torch.zeros_like(log_probs)),
        means=in_rows([step.mean for step, _ in parts]),
        std=in_rows([step.std for step, _ in parts]),
        g=in_rows([step.g for step, _ in parts]),
        next=x_next,
        valid=valid,
    )


def step_values(
    critic: Callable[[Tensor, Tensor, Conditions], Tensor],
    *,
    latents: Tensor,
    positions: Tensor,
    sigmas: Tensor,
    steps: Tensor,
    conditions: Conditions,
    stacked: bool = True,
) -> Tensor:
    """[n, S] fp32: the critic's value before each stored step, with gradient; 0 where a row has none.

    critic: takes x [B, ...], sigma [B] and conditions of B rows, returns [B].  latents, positions, sigmas, steps: as
        `replay` takes them.  conditions: one entry per row; no guidance.
    stacked: one call of n * S rows, or S calls of n rows; also for padding.

    Raises ValueError as `replay` does.
    """
    stored = _StoredSteps.of(latents=latents, positions=positions, sigmas=sigmas, steps=steps)
    parts = [
        critic(
            stored.x[:, group].transpose(0, 1).flatten(0, 1),
            stored.sigma[:, group].T.flatten(),
            _tiled(conditions, group.stop - group.start),
        ).float()
        for group in _groups(steps.shape[1], stacked=stacked)
    ]
    values = torch.cat(parts).view(steps.shape[1], -1).T
    return torch.where(stored.valid, values, torch.zeros_like(values))


def velocity_at(
    velocity: Velocity,
    x: Tensor,
    sigma: Tensor,
    *,
    conditions: Branches,
    guidance: Guidance = NO_GUIDANCE,
    stacked: bool = True,
    only_positive: bool = False,
) -> Tensor:
    """The velocity at k points of each of n rows.  Returns [n, k, ...] fp32, with gradient.

    x: [n, k, ...].  sigma: [n, k].  conditions: of each branch of the guidance, an entry per row.
    stacked: one forward of n * k rows, or k forwards of n rows; they agree to fp32 rounding.  only_positive: see
    `guided_velocity`.

    Calls `guided_velocity` 1 (stacked) or k times.
    """

    def block(columns: slice) -> Tensor:
        return _block_velocity(
            velocity,
            x[:, columns].transpose(0, 1).flatten(0, 1),
            sigma[:, columns].T.flatten().to(x.device),
            columns=columns.stop - columns.start,
            conditions=conditions,
            guidance=guidance,
            only_positive=only_positive,
        )

    num_columns = x.shape[1]
    joined = torch.cat([block(group) for group in _groups(num_columns, stacked=stacked)])
    return joined.view(num_columns, -1, *joined.shape[1:]).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class _StoredSteps:
    """The S stored steps of n rows, on the device of the latents. Padding has some stored pair, so that its numbers are
    finite; `valid` drops them."""

    x: Tensor
    """[n, S, ...] fp32 before each step."""
    x_next: Tensor
    """[n, S, ...] fp32 after it."""
    sigma: Tensor
    """[n, S] fp32."""
    sigma_next: Tensor
    """[n, S] fp32."""
    valid: Tensor
    """[n, S] bool."""

    @classmethod
    def of(cls, *, latents: Tensor, positions: Tensor, sigmas: Tensor, steps: Tensor) -> _StoredSteps:
        if not steps.shape[1]:
            raise ValueError("replay: there are no steps to replay. Pass sde_steps with at least one column.")
        if steps.device.type == "cpu":
            # Elsewhere the host would wait at every replay; see `check_stored_steps`.
            _check_steps(latents=latents, positions=positions, sigmas=sigmas, steps=steps)
        device = latents.device
        sigmas = sigmas.to(device=device, dtype=torch.float32)
        positions, steps = positions.to(device), steps.to(device)
        valid, at = steps >= 0, steps.clamp_min(0)
        slots, next_slots = (
            torch.where(valid, is_there.int().argmax(dim=2), 0) for is_there in _ends(positions, steps)
        )
        rows = torch.arange(latents.shape[0], device=device)[:, None]
        return cls(
            x=latents[rows, slots].detach().float(),
            x_next=latents[rows, next_slots].detach().float(),
            sigma=sigmas[at],
            sigma_next=sigmas[at + 1],
            valid=valid,
        )


def _block_velocity(
    velocity: Velocity,
    x: Tensor,
    sigma: Tensor,
    *,
    columns: int,
    conditions: Branches,
    guidance: Guidance,
    only_positive: bool,
) -> Tensor:
    """The velocity at concatenated blocks of n rows: x [columns * n, ...], with the conditions of one block."""
    return guided_velocity(
        velocity,
        x,
        sigma,
        conditions={
            branch: _tiled(conditions[branch], columns) for branch in guidance.branches if branch in conditions
        },
        guidance=guidance,
        only_positive=only_positive,
    )


def check_stored_steps(track: Track) -> None:
    """Raise what a replay of a track on the CPU would raise, once, before its rows are replayed on another device.

    Positions, steps and sigmas are read where they are, which should be on the CPU. Passes for a track without scored
    steps. Raises ValueError for steps that are out of order or not stored, and for steps without a density.
    """
    segment = track.segment
    if not isinstance(segment, LatentSegment) or not segment.scored_steps.shape[1]:
        return
    steps, sigmas = segment.scored_steps.cpu(), segment.sigmas.cpu()
    _check_steps(latents=segment.latents, positions=segment.positions.cpu(), sigmas=sigmas, steps=steps)
    if bool((steps >= 0).any()):
        kernel_of(segment.sampler).check_density(sigmas, steps[steps >= 0])


def _check_steps(*, latents: Tensor, positions: Tensor, sigmas: Tensor, steps: Tensor) -> None:
    """Raises ValueError for a schedule that does not fall, and for steps that are out of range or not stored."""
    check_sigmas(sigmas)
    check_sde_steps(steps.numpy(), num_rows=latents.shape[0], num_steps=sigmas.shape[0] - 1)
    if positions.shape[1] == 0:
        raise ValueError("replay: the trajectory stores no latents.")
    starts, ends = _ends(positions.cpu(), steps)
    missing = (steps >= 0) & ~(starts.any(dim=2) & ends.any(dim=2))
    if bool(missing.any()):
        row, column = (int(index) for index in missing.nonzero()[0])
        step = int(steps[row, column])
        stored = [int(position) for position in positions[row]]
        raise ValueError(
            f"replay: row {row} has no stored latents for step {step}: expected positions {step} and {step + 1}, "
            f"stored are {stored}. Have the rollout score this step, or keep both positions."
        )


def _ends(positions: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """[n, S, K] bool: the columns of `latents` that hold each step's start, and its end."""
    return positions[:, None, :] == steps[:, :, None], positions[:, None, :] == steps[:, :, None] + 1


def _groups(columns: int, *, stacked: bool) -> list[slice]:
    """Columns that go through the model together. A slice takes no index tensor to the device."""
    return [slice(0, columns)] if stacked else [slice(column, column + 1) for column in range(columns)]


def _tiled(conditions: Conditions, count: int) -> dict[str, Ragged]:
    if count == 1:
        return dict(conditions)
    return {key: join(f"conditions[{key!r}]", [value] * count) for key, value in conditions.items()}
