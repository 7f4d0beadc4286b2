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
from unirl.numerics.diffusion.denoise import check_sde_steps, check_sigmas
from unirl.numerics.diffusion.guidance import NO_GUIDANCE, Branches, Conditions, Guidance, Velocity, guided_velocity
from unirl.numerics.diffusion.kernels import Kernel
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

    Calls the velocity (1 if stacked else S) * guidance.num_forwards times, also for padding: ranks that replay
    together must call it equally often.

    Raises ValueError when a step's latents are not stored, naming the row and the step.
    """
    stored = _StoredSteps.of(latents=latents, positions=positions, sigmas=sigmas, steps=sde_steps)
    x, x_next, sigma, sigma_next, valid = stored.x, stored.x_next, stored.sigma, stored.sigma_next, stored.valid
    sigmas = sigmas.to(device=latents.device, dtype=torch.float32)

    def transition_of(columns: list[int]) -> tuple[Transition, Tensor]:
        """len(columns) blocks of n rows, concatenated."""
        block = x[:, columns].transpose(0, 1).flatten(0, 1)
        block_sigma = sigma[:, columns].T.flatten()
        if means is None:
            v = _block_velocity(
                velocity,
                block,
                block_sigma,
                columns=len(columns),
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

    all_columns = list(range(sde_steps.shape[1]))
    parts = [transition_of(group) for group in ([all_columns] if stacked else [[c] for c in all_columns])]

    def in_rows(blocks: list[Tensor]) -> Tensor:
        joined = torch.cat(blocks)
        return joined.view(len(all_columns), -1, *joined.shape[1:]).transpose(0, 1)

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
    columns = list(range(steps.shape[1]))
    parts = [
        critic(
            stored.x[:, group].transpose(0, 1).flatten(0, 1),
            stored.sigma[:, group].T.flatten(),
            _tiled(conditions, len(group)),
        ).float()
        for group in ([columns] if stacked else [[column] for column in columns])
    ]
    values = torch.cat(parts).view(len(columns), -1).T
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

    Calls the velocity (1 if stacked else k) * guidance.num_forwards times.
    """

    def block(columns: list[int]) -> Tensor:
        return _block_velocity(
            velocity,
            x[:, columns].transpose(0, 1).flatten(0, 1),
            sigma[:, columns].T.flatten().to(x.device),
            columns=len(columns),
            conditions=conditions,
            guidance=guidance,
            only_positive=only_positive,
        )

    every = list(range(x.shape[1]))
    joined = torch.cat([block(group) for group in ([every] if stacked else [[column] for column in every])])
    return joined.view(len(every), -1, *joined.shape[1:]).transpose(0, 1)


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
        check_sigmas(sigmas)
        check_sde_steps(steps.cpu().numpy(), num_rows=latents.shape[0], num_steps=sigmas.shape[0] - 1)
        if not steps.shape[1]:
            raise ValueError("replay: there are no steps to replay. Pass sde_steps with at least one column.")
        steps = steps.cpu()
        valid = steps >= 0
        slots, next_slots = _slots(positions.cpu(), steps, valid)
        rows = torch.arange(latents.shape[0])[:, None]
        sigmas = sigmas.to(device=latents.device, dtype=torch.float32)
        at = steps.clamp_min(0).to(latents.device)
        return cls(
            x=latents[rows, slots].detach().float(),
            x_next=latents[rows, next_slots].detach().float(),
            sigma=sigmas[at],
            sigma_next=sigmas[at + 1],
            valid=valid.to(latents.device),
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


def _slots(positions: Tensor, steps: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `latents` [n, S] that hold each step's start and its end; 0 where not valid."""
    if positions.shape[1] == 0:
        raise ValueError("replay: the trajectory stores no latents.")
    starts = positions[:, None, :] == steps[:, :, None]
    ends = positions[:, None, :] == steps[:, :, None] + 1
    missing = valid & ~(starts.any(dim=2) & ends.any(dim=2))
    if bool(missing.any()):
        row, column = (int(index) for index in missing.nonzero()[0])
        step = int(steps[row, column])
        stored = [int(position) for position in positions[row]]
        raise ValueError(
            f"replay: row {row} has no stored latents for step {step}: expected positions {step} and {step + 1}, "
            f"stored are {stored}. Have the rollout score this step, or keep both positions."
        )
    start_slots = torch.where(valid, starts.int().argmax(dim=2), 0)
    return start_slots, torch.where(valid, ends.int().argmax(dim=2), 0)


def _tiled(conditions: Conditions, count: int) -> dict[str, Ragged]:
    if count == 1:
        return dict(conditions)
    return {key: join(f"conditions[{key!r}]", [value] * count) for key, value in conditions.items()}
