"""The way that a rollout should have taken, from the formulas of its kernel, its guidance and its noise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.core.match.sampling import DETERMINISTIC_KERNELS
from unirl.core.roles import DiffusionModel
from unirl.core.types.array import Ragged
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import LatentSegment
from unirl.numerics.noise import INITIAL, noise

from .kernel_formulas import Step, log_density, multistep, ode_step, sde_step
from .samplers import GUIDANCE, KERNEL

__all__ = ["ExpectedTrajectory", "expected_trajectory"]


@dataclass(frozen=True, kw_only=True)
class ExpectedTrajectory:
    """N rows over T steps, fp64. Every step starts at the latent that was stored, where it was."""

    predicted: Tensor
    """[N, T, ...] where each step should end; at a stochastic step the mean of it."""
    stored: Tensor
    """[N, T, ...] where it ended, by the latents that were stored; anything where not `seen`."""
    std: Tensor
    """[N, T]; 0 where the step is deterministic."""
    noise: Tensor
    """[N, T, ...] that the recipe gives for each step."""
    seen: Tensor
    """[N, T] bool: the start of the step is known and its end was stored."""
    log_probs: Tensor
    """[N, T] of the stored ends under the formula; 0 where the step is deterministic or not seen."""

    @property
    def stochastic(self) -> Tensor:
        """[N, T] bool: a step with noise that can be looked at."""
        return self.seen & (self.std > 0)

    @property
    def deterministic(self) -> Tensor:
        """[N, T] bool: a step without noise that can be looked at."""
        return self.seen & (self.std == 0)

    def drawn(self) -> Tensor:
        """[M, ...] the noise that the engine must have drawn at the stochastic steps: (stored - mean) / std."""
        chosen = self.stochastic
        return (self.stored - self.predicted)[chosen] / _rows(self.std[chosen], self.stored.ndim - 1)

    def recipe(self) -> Tensor:
        """[M, ...] the noise that the request's recipe gives for the same steps."""
        return self.noise[self.stochastic]

    def error(self, chosen: Tensor, *, with_noise: bool = False) -> float:
        """Largest distance of these steps [N, T] from where they should end, as a share of the latents' rms.

        with_noise: stochastic steps end at mean + std x the recipe's noise.
        """
        assert bool(chosen.any()), "the rollout stores no step that could be looked at"
        expected = self.predicted + _rows(self.std, self.stored.ndim) * self.noise if with_noise else self.predicted
        return distance(self.stored[chosen], expected[chosen])


def distance(result: Tensor, expected: Tensor) -> float:
    """Largest absolute difference as a share of the rms of the expected values; 0 where there are none, such as the
    latents of the images of a prompt without any."""
    if not (result.numel() or expected.numel()):
        return 0.0
    expected = expected.double()
    scale = expected.square().mean().sqrt().clamp_min(1e-12)
    return float((result.double() - expected).abs().max() / scale)


def expected_trajectory(
    model: DiffusionModel,
    request: Request,
    segment: LatentSegment,
    *,
    conditions: Mapping[str, Mapping[str, Ragged]],
    knows_start: bool,
) -> ExpectedTrajectory:
    """Walk every row of the request with the model's velocity, as the request says, along the stored latents.

    conditions: branch of the guidance -> those of each row.  knows_start: x_T is the recipe's where it was not stored.
    """
    expected = request.latent
    sampling, device = expected.sampling, model.device
    kernel, eta, options = sampling.kernel, sampling.eta, sampling.kernel_options
    if kernel == KERNEL:
        kernel, eta = "dance-sde", eta * options["factor"]
    sigmas = [float(sigma) for sigma in expected.sigmas]
    stored, is_stored = _dense(segment, num_steps=len(sigmas) - 1, device=device)
    rows, shape = stored.shape[0], stored.shape[2:]
    known = is_stored[:, 0] | knows_start
    start = noise(seed=request.seed, rollout=request.rollout, ids=expected.noise_ids, step=INITIAL, shape=shape)
    x = torch.where(_rows(is_stored[:, 0], stored.ndim - 1), stored[:, 0], start.to(device).double())
    before: tuple[Tensor, float] | None = None
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for step, (sigma, after) in enumerate(itertools.pairwise(sigmas)):
        v = _guided(model, x.float(), sigma, conditions, sampling)
        keys = expected.step_noise_ids
        ids = request.sample_ids if keys is None else [own[step] for own in keys]
        drawn = noise(seed=request.seed, rollout=request.rollout, ids=ids, step=step, shape=shape)
        drawn = drawn.to(device).double()
        if kernel == "dpm2":
            mean, before = multistep(x, v, sigma=sigma, after=after, before=before)
            std = torch.zeros(rows, dtype=torch.float64, device=device)
            density = torch.zeros_like(std)
        else:
            is_sde = (expected.sde_steps == step).any(1).to(device)
            plain = ode_step(kernel, sigma=sigma, after=after, options=options)
            noisy = plain
            if kernel not in DETERMINISTIC_KERNELS:
                noisy = sde_step(kernel, sigma=sigma, after=after, second=sigmas[1], eta=eta, options=options)
            mean = torch.where(_rows(is_sde, x.ndim), _mean(noisy, x, v), _mean(plain, x, v))
            std = noisy.std * is_sde.double()
            density = torch.zeros_like(std)
            if noisy.std > 0:
                density = log_density(kernel, stored[:, step + 1], mean, noisy.std, options=options)
        seen = known & is_stored[:, step + 1]
        density = torch.where(seen & (std > 0), density, 0.0)
        columns.append((mean, stored[:, step + 1], std, drawn, seen, density))
        onward = mean + _rows(std, x.ndim) * drawn
        x = torch.where(_rows(is_stored[:, step + 1], x.ndim), stored[:, step + 1], onward)
        known = known | is_stored[:, step + 1]
    predicted, ends, std, drawn, seen, density = (torch.stack(parts, 1) for parts in zip(*columns, strict=True))
    return ExpectedTrajectory(predicted=predicted, stored=ends, std=std, noise=drawn, seen=seen, log_probs=density)


def _guided(
    model: DiffusionModel,
    x: Tensor,
    sigma: float,
    conditions: Mapping[str, Mapping[str, Ragged]],
    sampling: LatentSamplingConfig,
) -> Tensor:
    """Classifier-free guidance, arXiv 2207.12598; `norm-corrected` gives it the norm of the conditional velocity over
    the channels: dim 1, or the last of packed latents [B, tokens, C]; `interval` and `two-scale` have a scale for each
    sigma; `text-image`, here without images, scales down to the norm of the whole conditional velocity; the guidance of
    `samplers` has three branches."""
    at = torch.full((x.shape[0],), sigma, dtype=torch.float32, device=x.device)
    mode, scale, options = sampling.guidance_mode, sampling.guidance_scale, sampling.guidance_options
    with torch.no_grad():
        v = {branch: model.velocity(x, at, own).double() for branch, own in conditions.items()}
    if mode == GUIDANCE:
        pulls = scale * (v["positive"] - v["empty"]) - options["away"] * (v["negative"] - v["empty"])
        return v["empty"] + pulls
    if mode == "interval" and not options["low"] < sigma <= options["high"]:
        scale = 1.0
    if mode == "two-scale" and sigma < options["boundary"]:
        scale = options["scale_low"]
    if scale == 1.0:
        return v["positive"]
    assert "negative" in v, "guidance is on and there are no negative conditions"
    guided = v["negative"] + scale * (v["positive"] - v["negative"])
    if mode == "norm-corrected":
        dim = -1 if x.ndim == 3 else 1
        norm = guided.norm(dim=dim, keepdim=True).clamp_min(1e-30)
        guided = guided * v["positive"].norm(dim=dim, keepdim=True) / norm
    if mode == "text-image":
        dims = tuple(range(1, x.ndim))
        norms = [torch.linalg.vector_norm(one, dim=dims, keepdim=True) for one in (v["positive"], guided)]
        guided = guided * (norms[0] / norms[1]).clamp(max=1)
    return guided


def _dense(segment: LatentSegment, *, num_steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N, T+1, ...] fp64 with the stored latents in their places, and which places are stored."""
    latents = segment.latents.detach().to(device=device, dtype=torch.float64)
    positions = segment.positions.to(device)
    dense = torch.zeros(latents.shape[0], num_steps + 1, *latents.shape[2:], dtype=torch.float64, device=device)
    is_stored = torch.zeros(latents.shape[0], num_steps + 1, dtype=torch.bool, device=device)
    row, slot = (positions >= 0).nonzero(as_tuple=True)
    dense[row, positions[row, slot]] = latents[row, slot]
    is_stored[row, positions[row, slot]] = True
    return dense, is_stored


def _mean(step: Step, x: Tensor, velocity: Tensor) -> Tensor:
    return step.on_x * x + step.on_velocity * velocity


def _rows(values: Tensor, rank: int) -> Tensor:
    """Trailing dims of size 1, up to `rank` dims."""
    return values.view(*values.shape, *(1,) * (rank - values.ndim))
