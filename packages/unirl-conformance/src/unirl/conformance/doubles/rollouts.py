"""Rollouts made by the shared loops over steps and tokens, for claims about parts other than engines."""

from __future__ import annotations

from typing import cast

import torch
from unirl.core.roles import DiffusionModel, Model, TextModel
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.track import Track
from unirl.numerics.diffusion.rollout import branch_inputs, encoded, latent_track, sample_latents
from unirl.numerics.tokens.rollout import completion_media, generate_text, text_conditions, text_track

__all__ = ["make_rollout"]


def make_rollout(model: Model, request: Request) -> Track:
    """The track of a request, sampled with the model as it is."""
    if isinstance(request.params, TextRequest):
        return _texts(cast(TextModel, model), request)
    return _latents(cast(DiffusionModel, model), request)


def _latents(model: DiffusionModel, request: Request) -> Track:
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


def _texts(model: TextModel, request: Request) -> Track:
    expected = request.text
    conditions = text_conditions(model, request.inputs, sampling=expected.sampling)
    generated = generate_text(model, expected, conditions=conditions)
    media = completion_media(model, generated.tokens, request)
    return text_track(request, generated=generated, media=media, version=request.policy_version, conditions=conditions)
