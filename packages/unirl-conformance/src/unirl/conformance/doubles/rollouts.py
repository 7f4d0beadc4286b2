"""Rollouts made by the shared loops over steps and tokens, for claims about parts that are no engine."""

from __future__ import annotations

import torch
from unirl.core.roles import DiffusionModel, TextModel
from unirl.core.types.request import Request
from unirl.core.types.track import Conditions, Track
from unirl.numerics.diffusion.rollout import latent_track, sample_latents
from unirl.numerics.tokens.rollout import generate_text, text_track, visible_texts

__all__ = ["sample_text", "sample_track"]


def sample_track(model: DiffusionModel, request: Request) -> Track:
    """The latent track of a request, sampled with the model as it is, decoded where the sampling says so."""
    expected = request.latent
    distinct = list(dict.fromkeys(request.prompts))
    with torch.no_grad():
        conditions = {"positive": _conditions(model, request, distinct, request.prompts)}
        if expected.sampling.guidance_scale != 1.0:
            negatives = [expected.sampling.negative_prompt]
            conditions["negative"] = _conditions(model, request, negatives, negatives * request.num_rows)
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
    generated = generate_text(model, expected)
    texts = visible_texts(model, generated.tokens, expected.sampling)
    return text_track(request, generated=generated, texts=texts, version=request.policy_version)


def _conditions(
    model: DiffusionModel, request: Request, distinct: list[str], prompts: tuple[str, ...] | list[str]
) -> Conditions:
    values = model.encode(distinct, sampling=request.latent.sampling)
    index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=model.device)
    return Conditions(values=values, index=index)
