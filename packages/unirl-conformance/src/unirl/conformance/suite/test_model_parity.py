"""The model against the pipeline that it comes from, run by the spec's `parity` without any code of the model."""

from __future__ import annotations

import torch
from unirl.conformance.benches.latent_model import NEGATIVE, LatentModelBench
from unirl.conformance.claims import claim
from unirl.conformance.workbench.requests import PROMPTS
from unirl.core.capability import Cap
from unirl.core.reference import ReferenceRun
from unirl.core.roles import DiffusionModel
from unirl.numerics.denoise import denoise
from unirl.numerics.kernels import make_kernel
from unirl.numerics.latent_rollout import guidance_of

SIGMA_BOUND = 2.4e-7
"""Four times the spacing of fp32 numbers just below 1: pipelines shift in fp32, where a grid and exp(mu) are
rounded."""
LATENT_BOUND = 1e-5
"""Of the largest latent, or of 1. A few forwards of fp32 arithmetic, in another order where batches differ."""
STEPS = 4


@claim("model", proves=Cap.LATENT_STAGE)
def test_schedule_is_that_of_the_reference_pipeline(bench: LatentModelBench) -> None:
    """The model asks for the very sigmas that its reference pipeline runs with, for few steps and for many.

    If it fails: print both. A schedule that is shifted twice, or ends at the smallest training sigma, is diffusers'
    default when it is given no sigmas; a dynamic shift needs the number of latent tokens.
    """
    with bench.model() as model:
        for steps in (STEPS, 11):
            sampling = bench.sampling(steps=steps)
            wanted = bench.reference(sampling, PROMPTS[:1], bench.latents(model, 1)).sigmas
            found = model.schedule(sampling)
            assert found.shape == wanted.shape, f"{list(found.shape)} sigmas, the pipeline has {list(wanted.shape)}"
            gap = (found.double().cpu() - wanted.double().cpu()).abs().max()
            bench.record(f"gap of the sigmas, {steps} steps", float(gap), bound=SIGMA_BOUND)


@claim("model", proves=Cap.LATENT_STAGE)
def test_final_latents_are_those_of_the_reference_pipeline(bench: LatentModelBench) -> None:
    """From the same prompts, initial latents and sigmas, without noise and guidance, the model ends where its
    reference pipeline ends: encoders, velocity and their order are right.

    If it fails: compare the conditions first, then the first velocity. Its sign (x1 - x0), the scale of the timestep
    and the order of text encoders are the usual causes.
    """
    _compare(bench, scale=1.0)


@claim("model", proves=Cap.GUIDANCE)
def test_guided_latents_are_those_of_the_reference_pipeline(bench: LatentModelBench) -> None:
    """The same with guidance and a negative prompt.

    If it fails while the claim without guidance holds: compare the conditions of the negative prompt with the
    pipeline's; then how it combines the two predictions: models with a norm correction need `guidance_mode` in the
    spec's `tiny`.
    """
    _compare(bench, scale=4.5)


def _compare(bench: LatentModelBench, *, scale: float) -> None:
    negative = NEGATIVE if scale != 1.0 else ""
    settings = {"steps": STEPS, "guidance_scale": scale, "negative_prompt": negative, "kernel": "euler", "eta": 0.0}
    sampling = bench.sampling(**settings)
    with bench.model() as model:
        initial = bench.latents(model, len(PROMPTS))
        wanted = bench.reference(sampling, PROMPTS, initial)
        found = _final(bench, model, wanted, initial, scale=scale, mode=sampling.guidance_mode)
    assert wanted.final.shape == found.shape, f"latents {list(found.shape)}, the pipeline's are {wanted.final.shape}"
    largest = max(1.0, float(wanted.final.abs().max()))
    gap = float((found.double().cpu() - wanted.final.double().cpu()).abs().max()) / largest
    bench.record("gap of the final latents", gap, bound=LATENT_BOUND)


def _final(
    bench: LatentModelBench,
    model: DiffusionModel,
    wanted: ReferenceRun,
    initial: torch.Tensor,
    *,
    scale: float,
    mode: str,
) -> torch.Tensor:
    """Final latents at the pipeline's own sigmas: whether they are the model's too is another claim."""
    guidance = guidance_of(scale=scale, mode=mode, latent_rank=initial.ndim)
    return denoise(
        model.velocity,
        initial,
        sigmas=wanted.sigmas,
        kernel=make_kernel("euler", eta=0.0),
        sde_steps=torch.zeros((len(initial), 0), dtype=torch.int64),
        conditions=bench.encode(model, PROMPTS),
        negatives=bench.encode(model, [NEGATIVE] * len(initial)) if guidance.is_on else None,
        guidance=guidance,
    ).final
