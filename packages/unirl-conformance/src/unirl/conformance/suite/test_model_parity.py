"""The model against the pipeline that it comes from, run by the spec's `parity` without any code of the model."""

from __future__ import annotations

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import PROMPTS
from unirl.conformance.fixtures.latent_model import NEGATIVE, LatentModelCase
from unirl.conformance.reference import ReferenceRun
from unirl.core.roles import DiffusionModel
from unirl.core.specs.capability import Cap
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import Guidance, make_guidance
from unirl.numerics.diffusion.kernels import make_kernel

SIGMA_BOUND = 2.4e-7
"""Four times the spacing of fp32 numbers just below 1: pipelines shift in fp32, where a grid and exp(mu) are
rounded."""
LATENT_BOUND = 1e-5
"""Share of the largest latent, or of 1. A few forwards of fp32 arithmetic, in another order where batches differ."""
MEDIA_BOUND = 1e-5
"""For pixels in [0, 1]. A decoder adds up to some thousand fp32 numbers of rounding 6e-8 in each of its layers, in
another order where batches differ: 1e-7 to 1e-6. One step of 8-bit colour is 4e-3."""
STEPS = 4


@claim("model", proves=Cap.LATENT_STAGE)
def test_schedule_is_that_of_the_reference_pipeline(case: LatentModelCase) -> None:
    """The model asks for exactly the sigmas that its reference pipeline runs with, for few steps and for many.

    If it fails: print both. A schedule that is shifted twice, or ends at the smallest training sigma, is diffusers'
    default when it is given no sigmas; a dynamic shift needs the number of latent tokens.
    """
    with case.model() as model:
        for steps in (STEPS, 11):
            sampling = case.sampling(num_inference_steps=steps)
            expected = case.reference(model, sampling, PROMPTS[:1]).sigmas
            result = model.schedule(sampling)
            assert result.shape == expected.shape, (
                f"{list(result.shape)} sigmas, the pipeline has {list(expected.shape)}"
            )
            gap = (result.double().cpu() - expected.double().cpu()).abs().max()
            case.record(f"gap of the sigmas, {steps} steps", float(gap), bound=SIGMA_BOUND)


@claim("model", proves=Cap.LATENT_STAGE)
def test_final_latents_are_those_of_the_reference_pipeline(case: LatentModelCase) -> None:
    """From the same prompts, initial latents and sigmas, without noise and guidance, the model ends where its
    reference pipeline ends: encoders, velocity and their order are right.

    If it fails: compare the conditions first, then the first velocity. Its sign (x1 - x0), the scale of the timestep
    and the order of text encoders are the usual causes.
    """
    _compare(case, scale=1.0)


@claim("model", proves=Cap.GUIDANCE)
def test_guided_latents_are_those_of_the_reference_pipeline(case: LatentModelCase) -> None:
    """The same with guidance and a negative prompt.

    If it fails while the claim without guidance holds: compare the conditions of the negative prompt with the
    pipeline's; then how it combines the two predictions: models with a norm correction need `guidance_mode` in the
    spec's `tiny`.
    """
    _compare(case, scale=4.5)


@claim("model", proves=Cap.LATENT_STAGE)
def test_decoded_media_are_those_of_the_reference_pipeline(case: LatentModelCase) -> None:
    """From the reference pipeline's final latents the model decodes the pixels that the pipeline decodes.

    If it fails: compare what the VAE is given first: scale and shift of its config, their order, and how packed latents
    are unpacked into channels and places. Then what is made of its output: axes, colours and the step from [-1, 1] to
    [0, 1].
    """
    with case.model() as model:
        expected = case.reference(model, _sampling(case, scale=1.0))
        media = model.decode(expected.final.to(case.device, torch.float32))
    assert media.shape == expected.media.shape, (
        f"the media are {list(media.shape)}, the pipeline's {list(expected.media.shape)}"
    )
    contrast = float(expected.media.max() - expected.media.min())
    assert contrast > 1000 * MEDIA_BOUND, (
        f"the pipeline's pixels differ by no more than {contrast:g}, so nothing can be told of how the model decodes; "
        "give the miniature's VAE larger weights"
    )
    case.record("gap of the pixels", _largest_gap(media, expected.media), bound=MEDIA_BOUND)


def _compare(case: LatentModelCase, *, scale: float) -> None:
    sampling = _sampling(case, scale=scale)
    with case.model() as model:
        expected = case.reference(model, sampling)
        result = _final(case, model, expected, make_guidance(sampling.guidance_mode, scale=scale))
    assert expected.final.shape == result.shape, (
        f"latents {list(result.shape)}, the pipeline's are {expected.final.shape}"
    )
    largest = max(1.0, float(expected.final.abs().max()))
    case.record("gap of the final latents", _largest_gap(result, expected.final) / largest, bound=LATENT_BOUND)


def _sampling(case: LatentModelCase, *, scale: float) -> LatentSamplingConfig:
    negative = NEGATIVE if scale != 1.0 else ""
    return case.sampling(
        num_inference_steps=STEPS, guidance_scale=scale, negative_prompt=negative, kernel="euler", eta=0.0
    )


def _largest_gap(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double().cpu() - expected.double().cpu()).abs().max())


def _final(case: LatentModelCase, model: DiffusionModel, expected: ReferenceRun, guidance: Guidance) -> torch.Tensor:
    """Final latents at the pipeline's own sigmas: whether they are the model's too is another claim."""
    initial = case.latents(model, len(PROMPTS))
    prompts = {"positive": PROMPTS, "negative": [NEGATIVE] * len(initial)}
    return denoise(
        model.velocity,
        initial,
        sigmas=expected.sigmas,
        kernel=make_kernel("euler", eta=0.0),
        sde_steps=torch.zeros((len(initial), 0), dtype=torch.int64),
        conditions={branch: case.encode(model, prompts[branch]) for branch in guidance.branches},
        guidance=guidance,
    ).x
