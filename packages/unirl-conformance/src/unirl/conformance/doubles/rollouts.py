"""Rollouts made by the shared loops over steps and tokens, for claims about parts that are no engine."""

from __future__ import annotations

import torch
from unirl.core.roles import DiffusionModel, TextModel
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.numerics.diffusion.rollout import branch_inputs, encoded, latent_track, sample_latents
from unirl.numerics.tokens.rollout import generate_text, text_conditions, text_track, visible_texts

__all__ = ["sample_text", "sample_track"]


def sample_track(model: DiffusionModel, request: Request) -> Track:
    """The latent track of a request, sampled with the model as it is, decoded where the sampling says so."""
    expected = request.latent
    with torch.no_grad():
        conditions = {
            branch: encoded(model, inputs, sampling=expected.sampling)
            for branch, inputs in branch_inputs(request).items()
        }
        segment = sample_latents(
            model.velocity,
            request,
            latent_shape=model.latent_shape(expected.sampling),
            conditions=conditions,
            device=model.device,
        )
        media = model.decode(segment.final) if expected.sampling.decode else None
    return latent_track(
        request,
        segment=segment,
        conditions=conditions,
        media=media,
        policy_version=(request.policy_version,) * request.num_rows,
    )


def sample_text(model: TextModel, request: Request) -> Track:
    """The text track of a request, generated with the model as it is."""
    expected = request.text
    conditions = text_conditions(model, request.inputs, sampling=expected.sampling)
    generated = generate_text(model, expected, conditions=conditions)
    texts = visible_texts(model, generated.tokens, expected.sampling)
    return text_track(request, generated=generated, texts=texts, version=request.policy_version, conditions=conditions)
