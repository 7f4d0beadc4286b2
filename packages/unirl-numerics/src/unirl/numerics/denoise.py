"""The one denoising loop: from x_T to the final latent, with what training needs to know about the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from unirl.numerics.guidance import NO_GUIDANCE, Conditions, Guidance, Velocity, guided_velocity
from unirl.numerics.kernels import History, Kernel

Store = Literal["window", "none", "full"]
StepNoise = Callable[[int, Tensor], Tensor]
"""step_noise(step, rows [R] int64) -> [R, ...] fp32 standard normal, for those rows of the batch."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A finished rollout of one latent track."""

    latents: Tensor
    """[N, K, ...] stored latents, fp32 or the storage dtype.  Zero where the position is padding."""
    positions: Tensor
    """[N, K] int64 on the CPU, rising.  latents[n, k] is the latent at sigmas[positions[n, k]]; -1 is
    padding."""
    sigmas: Tensor
    """[T + 1] fp32."""
    sde_steps: Tensor
    """[N, S] int64 on the CPU, rising.  The stochastic steps of each row; -1 is padding."""
    log_probs: Tensor | None
    """[N, S] fp32, 0 where padded."""
    means: Tensor | None
    """[N, S, ...] fp32 transition means, 0 where padded."""
    final: Tensor
    """[N, ...] fp32."""


def denoise(
    velocity: Velocity,
    initial: Tensor,
    *,
    sigmas: Tensor,
    kernel: Kernel,
    sde_steps: Tensor | NDArray[np.int64],
    conditions: Conditions,
    negatives: Conditions | None = None,
    guidance: Guidance = NO_GUIDANCE,
    step_noise: StepNoise | None = None,
    store: Store = "window",
    with_log_probs: bool = True,
    with_means: bool = False,
    storage_dtype: torch.dtype | None = None,
) -> Trajectory:
    """Walk `initial` down the schedule, T steps, and keep what replay needs.

    initial: [N, ...] of any rank, x_T.  sigmas: [T + 1], strictly falling.
    sde_steps: [N, S], rising per row, -1 as padding at the end.  A row takes the stochastic step at these and
    the kernel's ODE step (Euler) elsewhere, bit for bit.  With a deterministic kernel it must be empty, and the
    kernel takes every step.
    step_noise: gives the noise of stochastic steps; nothing is drawn from a global generator.
    store: "window" keeps the positions i and i + 1 of every stochastic step i, and T; "full" keeps all; "none"
    keeps none.
    storage_dtype: latents are rounded to it after every step and before they are scored, so that replay sees
    the emitted numbers.  None keeps fp32.

    Runs under the caller's grad mode: `final` carries the gradient through the sampler if it is on; stored
    latents, log-probs and means never do.  Calls the velocity T * guidance.num_forwards times.

    Raises ValueError when the arguments do not fit together.
    """
    walk = Walk(
        initial,
        sigmas=sigmas,
        kernel=kernel,
        sde_steps=sde_steps,
        step_noise=step_noise,
        store=store,
        with_log_probs=with_log_probs,
        with_means=with_means,
        storage_dtype=storage_dtype,
    )
    return finished(walk, velocity, conditions=conditions, negatives=negatives, guidance=guidance)


def finished(
    walk: Walk,
    velocity: Velocity,
    *,
    conditions: Conditions,
    negatives: Conditions | None = None,
    guidance: Guidance = NO_GUIDANCE,
) -> Trajectory:
    """Take every step that is left of a walk."""
    for sigma in walk.sigmas[walk.step : -1]:
        rows = sigma.expand(walk.x.shape[0])
        v = guided_velocity(velocity, walk.x, rows, conditions=conditions, negatives=negatives, guidance=guidance)
        walk.advance(v)
    return walk.trajectory()


class Walk:
    """The way from x_T to the final latent, one step after the other: `denoise` without the velocity.

    For engines that have a loop of their own, which gives the velocity of each step.
    """

    x: Tensor
    """[N, ...] fp32, the latent at `sigmas[step]`."""
    step: int
    """Number of steps that were taken."""
    sigmas: Tensor
    """[T + 1] fp32, on the latent's device."""

    def __init__(
        self,
        initial: Tensor,
        *,
        sigmas: Tensor,
        kernel: Kernel,
        sde_steps: Tensor | NDArray[np.int64],
        step_noise: StepNoise | None = None,
        store: Store = "window",
        with_log_probs: bool = True,
        with_means: bool = False,
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        """Everything as in `denoise`. Raises ValueError when the arguments do not fit together."""
        given = sde_steps.cpu().numpy() if isinstance(sde_steps, Tensor) else sde_steps
        plan = np.array(given, dtype=np.int64, order="C")
        num_steps = sigmas.shape[0] - 1
        check_sigmas(sigmas)
        check_sde_steps(plan, num_rows=initial.shape[0], num_steps=num_steps)
        _check_kernel(kernel, plan=plan, step_noise=step_noise)
        self.sigmas = sigmas.to(device=initial.device, dtype=torch.float32)
        self._kernel, self._plan, self._step_noise, self._storage = kernel, plan, step_noise, storage_dtype
        self._positions = _stored_positions(plan, store=store, num_steps=num_steps)
        self._latents = _Columns(self._positions, like=initial, dtype=storage_dtype or torch.float32)
        self._log_probs = torch.zeros(plan.shape, device=initial.device) if with_log_probs else None
        self._means = _Columns(plan, like=initial, dtype=torch.float32) if with_means else None
        self._history: History | None = None
        self.step = 0
        self.x = _rounded(initial.float(), storage_dtype)
        self._latents.write(0, self.x)

    def advance(self, velocity: Tensor) -> None:
        """Take the next step. velocity: [N, ...] at `x` and `sigmas[step]`."""
        step, x, kernel = self.step, self.x, self._kernel
        assert step < self.sigmas.shape[0] - 1, "the walk is at its end"
        num_rows = x.shape[0]
        sigma, sigma_next = self.sigmas[step].expand(num_rows), self.sigmas[step + 1].expand(num_rows)
        is_sde = (self._plan == step).any(axis=1)
        if kernel.is_stochastic and not is_sde.any():
            self._arrive(kernel.ode_step(x, velocity=velocity, sigma=sigma, sigma_next=sigma_next))
            return
        transition = kernel.transition(
            x,
            velocity=velocity,
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_max=self.sigmas[1],
            history=self._history,
        )
        self._history = transition.history
        if not kernel.is_stochastic:
            self._arrive(transition.mean)
            return
        # Whole-batch arithmetic even where few rows are stochastic: a replay of the same batch then repeats
        # it exactly, down to the order of every sum.
        assert self._step_noise is not None
        x_next = kernel.sample(transition, _noise_of(self._step_noise, step, is_sde, like=x))
        if not is_sde.all():
            x_ode = kernel.ode_step(x, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
            x_next = torch.where(_row_mask(is_sde, like=x), x_next, x_ode)
        self._arrive(x_next)
        if self._log_probs is not None:
            rows, columns = _indices(self._plan == step, device=x.device)
            self._log_probs[rows, columns] = kernel.log_prob(self.x, transition).detach()[rows]
        if self._means is not None:
            self._means.write(step, transition.mean)

    def trajectory(self) -> Trajectory:
        """What came of it, once every step was taken."""
        assert self.step == self.sigmas.shape[0] - 1, "the walk is not at its end"
        return Trajectory(
            latents=self._latents.values,
            positions=torch.as_tensor(self._positions),
            sigmas=self.sigmas,
            sde_steps=torch.as_tensor(self._plan),
            log_probs=self._log_probs,
            means=None if self._means is None else self._means.values,
            final=self.x,
        )

    def _arrive(self, x: Tensor) -> None:
        self.step += 1
        self.x = _rounded(x, self._storage)
        self._latents.write(self.step, self.x)


def check_sigmas(sigmas: Tensor) -> None:
    """Raises ValueError unless sigmas is [T + 1], T >= 1, finite, strictly falling and never negative."""
    values = sigmas.detach().double().cpu()
    falls = values.ndim == 1 and len(values) >= 2 and bool((values[1:] < values[:-1]).all())
    if not (falls and bool(torch.isfinite(values).all()) and float(values[-1]) >= 0):
        raise ValueError(
            f"sigmas: {[float(value) for value in values.flatten()]} must be [T + 1] numbers that fall "
            "strictly and end at 0."
        )


def check_sde_steps(plan: NDArray[np.int64], *, num_rows: int, num_steps: int) -> None:
    """Raises ValueError unless plan is [N, S], in range, strictly rising per row with -1 only at the end."""
    if plan.ndim != 2 or plan.shape[0] != num_rows:
        raise ValueError(f"sde_steps: shape {list(plan.shape)}; [{num_rows}, S] is needed, one row per sample.")
    if plan.size and not -1 <= plan.min() <= plan.max() < num_steps:
        raise ValueError(
            f"sde_steps: found steps from {plan.min()} to {plan.max()}; they count from 0 to "
            f"{num_steps - 1}, and -1 is padding."
        )
    is_padding = plan == -1
    rises = (plan[:, 1:] > plan[:, :-1]) | is_padding[:, 1:]
    resumes = is_padding[:, :-1] & ~is_padding[:, 1:]
    bad = np.flatnonzero((~rises | resumes).any(axis=1))
    if len(bad):
        raise ValueError(
            f"sde_steps: row {bad[0]} is {plan[bad[0]].tolist()}; steps must rise, with -1 only at the end."
        )


def _check_kernel(kernel: Kernel, *, plan: NDArray[np.int64], step_noise: StepNoise | None) -> None:
    has_steps = bool((plan >= 0).any())
    if has_steps and not kernel.is_stochastic:
        raise ValueError(
            f"denoise: sde_steps asks for stochastic steps, but kernel '{kernel.name}' is deterministic as "
            "configured. Use one with eta > 0, or pass sde_steps of shape [N, 0]."
        )
    if has_steps and step_noise is None:
        raise ValueError("denoise: sde_steps asks for stochastic steps, but step_noise is None. Pass one.")


def _stored_positions(plan: NDArray[np.int64], *, store: Store, num_steps: int) -> NDArray[np.int64]:
    """[N, K], rising per row, padded with -1."""
    num_rows = plan.shape[0]
    if store == "none":
        return np.empty((num_rows, 0), dtype=np.int64)
    if store == "full":
        return np.tile(np.arange(num_steps + 1, dtype=np.int64), (num_rows, 1))
    if store != "window":
        raise ValueError(f"denoise: store '{store}' is not known; known are window, none, full.")
    is_stored = np.zeros((num_rows, num_steps + 1), dtype=bool)
    is_stored[:, num_steps] = True
    rows, columns = np.nonzero(plan >= 0)
    is_stored[rows, plan[rows, columns]] = True
    is_stored[rows, plan[rows, columns] + 1] = True
    counts = is_stored.sum(axis=1)
    positions = np.full((num_rows, int(counts.max(initial=0))), -1, dtype=np.int64)
    rows, found = np.nonzero(is_stored)
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions[rows, slots] = found
    return positions


class _Columns:
    """A [N, K, ...] buffer whose columns are labelled per row; written once per label."""

    def __init__(self, labels: NDArray[np.int64], *, like: Tensor, dtype: torch.dtype) -> None:
        self._labels = labels
        self.values = torch.zeros(*labels.shape, *like.shape[1:], dtype=dtype, device=like.device)

    def write(self, label: int, rows: Tensor) -> None:
        """Keep `rows` [N, ...] in every row that has this label."""
        is_here = self._labels == label
        if is_here.shape[1] == 0 or not is_here.any():
            return
        whole = np.flatnonzero(is_here.all(axis=0))
        if len(whole):
            self.values[:, int(whole[0])] = rows.detach().to(self.values.dtype)
            return
        indices, columns = _indices(is_here, device=rows.device)
        self.values[indices, columns] = rows.detach()[indices].to(self.values.dtype)


def _noise_of(step_noise: StepNoise, step: int, is_sde: NDArray[np.bool_], *, like: Tensor) -> Tensor:
    """[N, ...]: the noise of the stochastic rows, zero elsewhere."""
    rows = torch.as_tensor(np.flatnonzero(is_sde))
    drawn = step_noise(step, rows).to(device=like.device, dtype=torch.float32)
    wanted = (len(rows), *like.shape[1:])
    if drawn.shape != wanted:
        raise ValueError(
            f"denoise: step_noise gave shape {list(drawn.shape)} at step {step}; {list(wanted)} is needed."
        )
    if is_sde.all():
        return drawn
    full = torch.zeros_like(like)
    full[rows.to(like.device)] = drawn
    return full


def _row_mask(is_sde: NDArray[np.bool_], *, like: Tensor) -> Tensor:
    return torch.as_tensor(is_sde, device=like.device).view(-1, *(1,) * (like.ndim - 1))


def _indices(mask: NDArray[np.bool_], *, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = np.nonzero(mask)
    return torch.as_tensor(rows, device=device), torch.as_tensor(columns, device=device)


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).float()
