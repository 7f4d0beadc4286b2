"""Recompute the stochastic transitions of a stored trajectory under the current weights, with gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.numerics.denoise import check_sde_steps, check_sigmas
from unirl.numerics.guidance import NO_GUIDANCE, Conditions, Guidance, Velocity, guided_velocity
from unirl.numerics.kernels import Kernel, Transition


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The transitions of n rows at S stored steps; losses take everything from here and recompute nothing."""

    log_probs: Tensor
    """[n, S] fp32 of the stored next latents, with gradient; 0 where not valid."""
    means: Tensor
    """[n, S, ...] fp32, with gradient."""
    std: Tensor
    """[n, S, 1, ...] fp32 std of the transitions."""
    g: Tensor
    """[n, S, 1, ...] fp32 diffusion coefficients."""
    next: Tensor
    """[n, S, ...] fp32.  The stored latents after each step."""
    valid: Tensor
    """[n, S] bool.  False where a row has fewer steps than others; such entries weigh nothing."""


def replay(
    velocity: Velocity,
    *,
    latents: Tensor,
    positions: Tensor,
    sigmas: Tensor,
    sde_steps: Tensor,
    kernel: Kernel,
    conditions: Conditions,
    negatives: Conditions | None = None,
    guidance: Guidance = NO_GUIDANCE,
    columns: Sequence[int] | None = None,
    stacked: bool = True,
    means: Tensor | None = None,
) -> Replayed:
    """Score the stored steps again.

    latents [n, K, ...], positions [n, K], sigmas [T + 1], sde_steps [n, S]: of a `Trajectory`, any subset of
    its rows.  conditions, negatives: [n, ...] per tensor.
    columns: which columns of `sde_steps` to replay, all if None; S below is their number.
    stacked: one forward of n * S rows, or one forward of n rows per column.  The numbers agree to fp32
    rounding; with False and the rollout's batch they repeat the rollout's arithmetic exactly.

    means: [n, S, ...] of the steps, where they are known: nothing is then asked of the velocity.

    Calls the velocity (1 if stacked else S) * guidance.num_forwards times, whatever is padding: ranks that
    replay together must call it equally often.

    Raises ValueError when a step's latents are not stored, naming the row and the step.
    """
    check_sigmas(sigmas)
    check_sde_steps(sde_steps.cpu().numpy(), num_rows=latents.shape[0], num_steps=sigmas.shape[0] - 1)
    chosen = list(range(sde_steps.shape[1])) if columns is None else list(columns)
    if not chosen:
        raise ValueError("replay: there are no steps to replay. Pass sde_steps with at least one column.")
    steps = sde_steps.cpu()[:, chosen]
    valid = steps >= 0
    slots, next_slots = _slots(positions.cpu(), steps, valid)
    # Padding replays some stored pair, so that its numbers are finite; `valid` drops them.
    rows = torch.arange(latents.shape[0])[:, None]
    device = latents.device
    x = latents[rows, slots].detach().float()
    x_next = latents[rows, next_slots].detach().float()
    sigmas = sigmas.to(device=device, dtype=torch.float32)
    at = steps.clamp_min(0).to(device)
    sigma, sigma_next = sigmas[at], sigmas[at + 1]

    def transition_of(columns: list[int]) -> tuple[Transition, Tensor]:
        """Of len(columns) blocks of n rows, one block after the other."""
        count = len(columns)
        block = x[:, columns].transpose(0, 1).flatten(0, 1)
        block_sigma = sigma[:, columns].T.flatten()
        if means is None:
            v = guided_velocity(
                velocity,
                block,
                block_sigma,
                conditions=_tiled(conditions, count),
                negatives=None if negatives is None else _tiled(negatives, count),
                guidance=guidance,
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

    all_columns = list(range(len(chosen)))
    parts = [transition_of(group) for group in ([all_columns] if stacked else [[c] for c in all_columns])]

    def in_rows(blocks: list[Tensor]) -> Tensor:
        joined = torch.cat(blocks)
        return joined.view(len(chosen), -1, *joined.shape[1:]).transpose(0, 1)

    log_probs = in_rows([log_prob for _, log_prob in parts])
    return Replayed(
        log_probs=torch.where(valid.to(device), log_probs, torch.zeros_like(log_probs)),
        means=in_rows([step.mean for step, _ in parts]),
        std=in_rows([step.std for step, _ in parts]),
        g=in_rows([step.g for step, _ in parts]),
        next=x_next,
        valid=valid.to(device),
    )


def _slots(positions: Tensor, steps: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `latents` [n, S] that hold each step's start and its end; 0 where not valid."""
    if positions.shape[1] == 0:
        raise ValueError("replay: the trajectory stores no latents. Roll out with store 'window' or 'full'.")
    starts = positions[:, None, :] == steps[:, :, None]
    ends = positions[:, None, :] == steps[:, :, None] + 1
    missing = valid & ~(starts.any(dim=2) & ends.any(dim=2))
    if bool(missing.any()):
        row, column = (int(index) for index in missing.nonzero()[0])
        step = int(steps[row, column])
        stored = [int(position) for position in positions[row]]
        raise ValueError(
            f"replay: row {row} has no stored latents for step {step}: positions {step} and {step + 1} are "
            f"needed, stored are {stored}. Roll out with store 'window' or 'full'."
        )
    start_slots = torch.where(valid, starts.int().argmax(dim=2), 0)
    return start_slots, torch.where(valid, ends.int().argmax(dim=2), 0)


def _tiled(conditions: Conditions, count: int) -> dict[str, Tensor]:
    if count == 1:
        return dict(conditions)
    return {key: torch.cat([value] * count) for key, value in conditions.items()}
