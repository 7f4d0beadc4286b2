"""The denoising loop: from x_T to the final latent, recording everything that training needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from unirl.core.types.batch import take
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import LatentSegment, Sampler
from unirl.numerics.diffusion.guidance import NO_GUIDANCE, Branches, Guidance, Velocity, guided_velocity
from unirl.numerics.diffusion.kernels import Kernel
from unirl.numerics.diffusion.sampler import sampler_of
from unirl.numerics.diffusion.transition import History

StepNoise = Callable[[int, Tensor], Tensor]
"""step_noise(step, rows [R] int64) -> [R, ...] fp32 standard normal, for those rows of the batch."""


def denoise(
    velocity: Velocity,
    initial: Tensor,
    *,
    sigmas: Tensor,
    kernel: Kernel,
    sde_steps: Tensor | NDArray[np.int64],
    conditions: Branches,
    guidance: Guidance = NO_GUIDANCE,
    step_noise: StepNoise | None = None,
    keep: Tensor | NDArray[np.int64] | None = None,
    with_means: bool = False,
    storage_dtype: torch.dtype | None = None,
    train_steps: Tensor | NDArray[np.int64] | None = None,
) -> Walk:
    """Denoise `initial` over the T steps of the schedule: `x` is then the final latent, and `segment` the record for
    replay.

    initial: [N, ...] of any rank, x_T.  sigmas: [T + 1], strictly falling.
    sde_steps: [N, S], rising per row, -1 as padding at the end.  A row takes the stochastic step at these and
    the kernel's ODE step (Euler) elsewhere, bit for bit.  With a deterministic kernel it must be empty, and the
    kernel takes every step.
    train_steps: [N, R], a subset of each row's sde_steps, padded the same way: only these are scored, and only their
    latents kept. None scores all.
    conditions: of each branch of the guidance, [N, ...] per tensor.
    step_noise: returns the noise of stochastic steps; no global generator is used.
    keep: [N, P], positions to store besides i and i + 1 of every scored step i, and T; -1 is none.
    storage_dtype: latents are rounded to it after every step and before scoring, so that replay sees the
    same numbers.  None keeps fp32.

    Runs under the caller's grad mode: `x` carries the gradient through the sampler if it is on; stored
    latents, log-probs and means never do.  Calls the velocity T * guidance.num_forwards times.

    Raises ValueError for inconsistent arguments.
    """
    walk = Walk(
        initial,
        sigmas=sigmas,
        kernel=kernel,
        guidance=guidance,
        sde_steps=sde_steps,
        step_noise=step_noise,
        keep=keep,
        with_means=with_means,
        storage_dtype=storage_dtype,
        train_steps=train_steps,
    )
    finish(walk, velocity, conditions=conditions)
    return walk


def finish(walk: Walk, velocity: Velocity, *, conditions: Branches) -> None:
    """Take all remaining steps of a walk, with its guidance. Rows that share a path go through `velocity` once, so
    they stay equal bit for bit; against a walk of every row by itself only the batch of the forward differs."""
    for sigma in walk.sigmas[walk.step : -1]:
        firsts, places = walk.paths()
        x, own = walk.x, conditions
        if len(firsts) < len(places):
            x = x[firsts]
            own = {
                branch: {name: take(value, firsts) for name, value in values.items()}
                for branch, values in conditions.items()
            }
        v = guided_velocity(velocity, x, sigma.expand(x.shape[0]), conditions=own, guidance=walk.guidance)
        walk.advance(v if len(firsts) == len(places) else v[places])


class Walk:
    """Step-by-step denoising from x_T to the final latent: `denoise` without the velocity.

    For engines with their own loop, which compute the velocity of each step, combined as `guidance` says.
    """

    x: Tensor
    """[N, ...] fp32, the latent at `sigmas[step]`."""
    step: int
    """Number of steps taken."""
    sigmas: Tensor
    """[T + 1] fp32, on the latent's device."""
    kernel: Kernel
    """Takes the steps."""
    guidance: Guidance
    """Combines the velocities of its branches."""

    def __init__(
        self,
        initial: Tensor,
        *,
        sigmas: Tensor,
        kernel: Kernel,
        guidance: Guidance = NO_GUIDANCE,
        sde_steps: Tensor | NDArray[np.int64],
        step_noise: StepNoise | None = None,
        keep: Tensor | NDArray[np.int64] | None = None,
        with_means: bool = False,
        storage_dtype: torch.dtype | None = None,
        train_steps: Tensor | NDArray[np.int64] | None = None,
        step_noise_ids: tuple[tuple[str, ...], ...] | None = None,
        starts: Sequence[Hashable] = (),
    ) -> None:
        """Arguments as in `denoise`. Raises ValueError for inconsistent arguments.

        step_noise_ids: [N] of T keys by which `step_noise` draws, where rows share noise.  starts: [N], equal for rows
        of equal conditions and x_T; needed with step_noise_ids.
        """
        plan = _as_plan(sde_steps)
        scored = plan if train_steps is None else _as_plan(train_steps)
        num_steps = sigmas.shape[0] - 1
        check_sigmas(sigmas)
        check_sde_steps(plan, num_rows=initial.shape[0], num_steps=num_steps)
        if train_steps is not None:
            check_train_steps(scored, plan=plan)
        _check_kernel(kernel, plan=plan, step_noise=step_noise)
        if kernel.is_stochastic and (scored >= 0).any():
            kernel.check_density(sigmas.cpu(), torch.as_tensor(np.unique(scored[scored >= 0])))
        self.sigmas = sigmas.to(device=initial.device, dtype=torch.float32)
        self.kernel, self.guidance = kernel, guidance
        self._plan, self._step_noise, self._storage = plan, step_noise, storage_dtype
        self._scored, self._scores_all = scored, train_steps is None
        self._keys, self._starts = step_noise_ids, starts
        self._positions = _stored_positions(scored, keep=None if keep is None else _as_plan(keep), num_steps=num_steps)
        self._latents = _Columns(self._positions, like=initial, dtype=storage_dtype or torch.float32)
        self._log_probs = torch.zeros(scored.shape, device=initial.device)
        self._means = _Columns(scored, like=initial, dtype=torch.float32) if with_means else None
        self._history: History | None = None
        self.step = 0
        self.x = rounded(initial.float(), storage_dtype)
        self._latents.write(0, self.x)

    def advance(self, velocity: Tensor) -> None:
        """Take the next step. velocity: [N, ...] at `x` and `sigmas[step]`."""
        step, x, kernel = self.step, self.x, self.kernel
        assert step < self.sigmas.shape[0] - 1, "all steps have been taken"
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
        # Whole-batch arithmetic even if only a few rows are stochastic: a replay of the same batch then repeats it
        # exactly, down to the order of every sum.
        assert self._step_noise is not None
        x_next = kernel.sample(transition, _noise_of(self._step_noise, step, is_sde, like=x))
        if not is_sde.all():
            x_ode = kernel.ode_step(x, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
            x_next = torch.where(_row_mask(is_sde, like=x), x_next, x_ode)
        self._arrive(x_next)
        is_scored = self._scored == step
        if is_scored.any():
            rows, columns = _indices(is_scored, device=x.device)
            self._log_probs[rows, columns] = kernel.log_prob(self.x, transition).detach()[rows]
        if self._means is not None:
            self._means.write(step, transition.mean)

    def paths(self) -> tuple[list[int], list[int]]:
        """The first row of each path, and of every row [N] its place among them: rows that have drawn the same noise
        from the same start are one path, whose latents are equal. Without `step_noise_ids` each row is one."""
        if self._keys is None:
            every = list(range(self.x.shape[0]))
            return every, every
        past = zip(self._starts, self._plan.tolist(), self._keys, strict=True)
        numbers: dict[Hashable, int] = {}
        drawn: list[tuple[Hashable, ...]] = [
            (start, *((step, own[step]) for step in steps if 0 <= step < self.step)) for start, steps, own in past
        ]
        places = [numbers.setdefault(path, len(numbers)) for path in drawn]
        return [places.index(place) for place in range(len(numbers))], places

    @property
    def sampler(self) -> Sampler:
        """Kernel and guidance as a record."""
        return sampler_of(self.kernel, self.guidance)

    def segment(self, *, initial_noise: tuple[str, ...] | None = None) -> LatentSegment:
        """The record of the steps for training, after all of them. initial_noise: digest of each row's x_T.

        Latents are fp32 or the storage dtype; positions, SDE steps and sigmas are on the CPU.
        """
        assert self.step == self.sigmas.shape[0] - 1, "not all steps have been taken"
        return LatentSegment(
            latents=self._latents.values,
            positions=torch.as_tensor(self._positions),
            sde_steps=torch.as_tensor(self._plan),
            train_steps=None if self._scores_all else torch.as_tensor(self._scored),
            log_probs=self._log_probs,
            means=None if self._means is None else self._means.values,
            sigmas=self.sigmas.cpu(),
            sampler=self.sampler,
            initial_noise=initial_noise,
            step_noise_ids=self._keys,
        )

    def _arrive(self, x: Tensor) -> None:
        self.step += 1
        self.x = rounded(x, self._storage)
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


def check_sde_steps(plan: NDArray[np.int64], *, num_rows: int, num_steps: int, name: str = "sde_steps") -> None:
    """Raises ValueError unless plan is [N, S], in range, strictly rising per row with -1 only at the end."""
    if plan.ndim != 2 or plan.shape[0] != num_rows:
        raise ValueError(f"{name}: got shape {list(plan.shape)}, expected [{num_rows}, S], one row per sample.")
    if plan.size and not -1 <= plan.min() <= plan.max() < num_steps:
        raise ValueError(
            f"{name}: got steps from {plan.min()} to {plan.max()}; they count from 0 to "
            f"{num_steps - 1}, and -1 is padding."
        )
    is_padding = plan == -1
    rises = (plan[:, 1:] > plan[:, :-1]) | is_padding[:, 1:]
    resumes = is_padding[:, :-1] & ~is_padding[:, 1:]
    bad = np.flatnonzero((~rises | resumes).any(axis=1))
    if len(bad):
        raise ValueError(f"{name}: row {bad[0]} is {plan[bad[0]].tolist()}; steps must rise, with -1 only at the end.")


def check_train_steps(scored: NDArray[np.int64], *, plan: NDArray[np.int64]) -> None:
    """Raises ValueError unless scored is [N, R], strictly rising per row with -1 only at the end, and a subset of
    plan [N, S]."""
    check_sde_steps(scored, num_rows=plan.shape[0], num_steps=int(plan.max(initial=-1)) + 1, name="train_steps")
    is_known = (scored[:, :, None] == plan[:, None, :]).any(axis=2) | (scored == -1)
    bad = np.flatnonzero(~is_known.all(axis=1))
    if len(bad):
        raise ValueError(
            f"train_steps: row {bad[0]} is {scored[bad[0]].tolist()}; expected some of its stochastic steps, "
            f"{plan[bad[0]].tolist()}."
        )


def _as_plan(steps: Tensor | NDArray[np.int64]) -> NDArray[np.int64]:
    given = steps.cpu().numpy() if isinstance(steps, Tensor) else steps
    return np.array(given, dtype=np.int64, order="C")


def _check_kernel(kernel: Kernel, *, plan: NDArray[np.int64], step_noise: StepNoise | None) -> None:
    has_steps = bool((plan >= 0).any())
    if has_steps and not kernel.is_stochastic:
        raise ValueError(
            f"denoise: sde_steps has stochastic steps, but kernel '{kernel.name}' is deterministic as "
            "configured. Use one with eta > 0, or pass sde_steps of shape [N, 0]."
        )
    if has_steps and step_noise is None:
        raise ValueError("denoise: sde_steps has stochastic steps, but step_noise is None. Pass one.")


def all_positions(num_rows: int, *, num_steps: int) -> Tensor:
    """[N, T + 1] int64, what `keep` is for whole trajectories."""
    return torch.arange(num_steps + 1).repeat(num_rows, 1)


def storage_dtype(sampling: LatentSamplingConfig) -> torch.dtype | None:
    """The dtype that these settings round latents to; None is fp32, where nothing is rounded."""
    return None if sampling.trajectory_dtype == "float32" else getattr(torch, sampling.trajectory_dtype)


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in fp32, with values of `dtype`."""
    return x if dtype is None else x.to(dtype).float()


def _stored_positions(plan: NDArray[np.int64], *, keep: NDArray[np.int64] | None, num_steps: int) -> NDArray[np.int64]:
    """[N, K], rising per row, padded with -1."""
    num_rows = plan.shape[0]
    is_stored = np.zeros((num_rows, num_steps + 1), dtype=bool)
    is_stored[:, num_steps] = True
    rows, columns = np.nonzero(plan >= 0)
    is_stored[rows, plan[rows, columns]] = True
    is_stored[rows, plan[rows, columns] + 1] = True
    if keep is not None:
        _check_keep(keep, num_rows=num_rows, num_steps=num_steps)
        rows, columns = np.nonzero(keep >= 0)
        is_stored[rows, keep[rows, columns]] = True
    counts = is_stored.sum(axis=1)
    positions = np.full((num_rows, int(counts.max(initial=0))), -1, dtype=np.int64)
    rows, result = np.nonzero(is_stored)
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions[rows, slots] = result
    return positions


def _check_keep(keep: NDArray[np.int64], *, num_rows: int, num_steps: int) -> None:
    if keep.ndim != 2 or keep.shape[0] != num_rows:
        raise ValueError(f"keep: got shape {list(keep.shape)}, expected [{num_rows}, P], one row per sample.")
    if keep.size and not -1 <= keep.min() <= keep.max() <= num_steps:
        raise ValueError(
            f"keep: got positions from {keep.min()} to {keep.max()}; they count from 0 to {num_steps}, and -1 is none."
        )


class _Columns:
    """A [N, K, ...] buffer whose columns are labelled per row; written once per label."""

    def __init__(self, labels: NDArray[np.int64], *, like: Tensor, dtype: torch.dtype) -> None:
        self._labels = labels
        self.values = torch.zeros(*labels.shape, *like.shape[1:], dtype=dtype, device=like.device)

    def write(self, label: int, rows: Tensor) -> None:
        """Store `rows` [N, ...] in every row that has this label."""
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
    expected = (len(rows), *like.shape[1:])
    if drawn.shape != expected:
        raise ValueError(
            f"denoise: step_noise returned shape {list(drawn.shape)} at step {step}, expected {list(expected)}."
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
