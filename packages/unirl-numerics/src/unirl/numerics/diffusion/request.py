"""Sampling plan of a latent track: noise ids, the schedule, SDE steps and those trained on, and digests of the initial
noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.numerics.diffusion.branching import branch_noise_ids
from unirl.numerics.diffusion.denoise import all_positions, rounded, storage_dtype
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.diffusion.merged_steps import merged_steps
from unirl.numerics.diffusion.sampler import with_every_option
from unirl.numerics.diffusion.sde_steps import select_sde_steps, select_train_steps
from unirl.numerics.noise import INITIAL, noise, noise_digest

__all__ = ["plan_latents", "sde_steps_of"]


def plan_latents(
    sampling: LatentSamplingConfig,
    *,
    sigmas: Tensor,
    latent_shape: Sequence[int],
    seed: int,
    rollout: int,
    sample_ids: Sequence[str],
    group_ids: Sequence[str],
    trajectory: Literal["none", "window", "full"] = "window",
) -> LatentRequest:
    """The parameters of a latent request.  Samples of a group share their SDE steps, and x_T if `same_initial_noise`.

    sigmas: [T+1], of which those inside a merged step are left out (`sde.min_noise_std`).
    latent_shape: of one sample.  sample_ids, group_ids: [N].
    trajectory: the latents that come back, as `unirl.core.specs.capability.Needs` has it: the clean ones alone, also
    those around the SDE steps, which are then scored, or all of them.
    Digests of two rows' x_T are sent along, to detect an engine with other initial noise: those of the first row and of
    another one, chosen anew in every rollout, which detects equal noise in all rows. More digests would have the caller
    generate all the noise a second time.

    Raises ValueError for SDE steps outside the schedule or with too little noise, for groups that do not fill the tree
    of `sde.branch_steps`, and for unknown options of the kernel or the guidance.
    """
    noise_ids = tuple(group_ids if sampling.same_initial_noise else sample_ids)
    digests = [""] * len(noise_ids)
    last = len(noise_ids) - 1
    for row in sorted({0, 1 + rollout % last} if last > 0 else range(len(noise_ids))):
        initial = noise(seed=seed, rollout=rollout, ids=[noise_ids[row]], step=INITIAL, shape=latent_shape)
        (digests[row],) = noise_digest(rounded(initial, storage_dtype(sampling)))
    steps = sde_steps_of(
        sampling.sde, num_steps=int(sigmas.shape[0]) - 1, rollout=rollout, group_ids=group_ids, seed=seed
    )
    if sampling.sde.min_noise_std and noise_ids:
        sigmas = _merged(sampling, sigmas=sigmas, step=int(steps[0, 0]))
    trained = None if trajectory != "none" else steps[:, :0]
    if trajectory != "none" and sampling.sde.train_fraction != 1:
        fraction = float(sampling.sde.train_fraction)
        trained = torch.tensor(
            select_train_steps(steps.numpy(), fraction=fraction, seed=seed, rollout=rollout, sample_ids=sample_ids)
        )
    keys = None
    if sampling.sde.branch_steps:
        keys = branch_noise_ids(
            sample_ids,
            group_ids,
            branch_steps=sampling.sde.branch_steps,
            factor=sampling.sde.branch_factor,
            num_steps=int(sigmas.shape[0]) - 1,
        )
    kept = all_positions(len(noise_ids), num_steps=int(sigmas.shape[0]) - 1)
    sampling = with_every_option(sampling)
    guidance = make_guidance(sampling.guidance_mode, scale=sampling.guidance_scale, **sampling.guidance_options)
    return LatentRequest(
        sampling=sampling,
        num_branches=len(guidance.computed_branches),
        # Echoes are compared bit for bit, on the CPU.
        sigmas=sigmas.cpu(),
        sde_steps=steps,
        train_steps=trained,
        noise_ids=noise_ids,
        initial_noise=tuple(digests),
        step_noise_ids=keys,
        keep=kept if trajectory == "full" else kept[:, :0],
    )


def _merged(sampling: LatentSamplingConfig, *, sigmas: Tensor, step: int) -> Tensor:
    """The schedule with its stochastic step merged with the ones after it. The other steps that a later rollout may
    draw are tried, too, so that one that cannot have the noise fails the first step of a run."""
    kernel, sde = make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options), sampling.sde
    possible = sde.possible_steps(int(sigmas.shape[0]) - 1)
    return {each: merged_steps(kernel, sigmas, step=each, std=sde.min_noise_std) for each in possible}[step]


def sde_steps_of(sde: SdeStepsConfig, *, num_steps: int, rollout: int, group_ids: Sequence[str], seed: int) -> Tensor:
    """The stochastic steps of each sample, selected by `sampling.sde`.  Returns [N, S] int64; S is 0 for mode
    'none'."""
    if sde.mode == "none":
        return torch.zeros((len(group_ids), 0), dtype=torch.int64)
    chosen = select_sde_steps(
        mode=sde.mode,  # type: ignore[arg-type]  # a string of the recipe; select_sde_steps names the known modes
        num_steps=num_steps,
        rollout=rollout,
        group_ids=group_ids,
        seed=seed,
        first=float(sde.first),
        last=float(sde.last),
        count=sde.count,
        window=sde.window,
        strategy=sde.strategy,  # type: ignore[arg-type]  # as above
        move_every=sde.move_every,
        overlap=sde.overlap,
        roll_back=sde.roll_back,
        per_group=sde.per_group,
        steps=sde.steps,
    )
    return torch.tensor(chosen, dtype=torch.int64)
