"""Rollouts made by the shared loops over steps and tokens, for claims about parts that are no engine."""

from __future__ import annotations

import torch
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel, TextModel
from unirl.core.track import Conditions, Track
from unirl.numerics.latent_rollout import latent_track, sample_latents
from unirl.numerics.text_rollout import generate_text, text_track, visible_texts

__all__ = ["sample_text", "sample_track"]


def sample_track(model: DiffusionModel, request: Request, name: str) -> Track:
    """One latent track of a request, sampled with the model as it is, decoded where the sampling says so."""
    wanted = request.latent(name)
    distinct = list(dict.fromkeys(request.prompts))
    with torch.no_grad():
        conditions = {"positive": _conditions(model, request, distinct, request.prompts, name)}
        if wanted.sampling.guidance_scale != 1.0:
            negatives = [wanted.sampling.negative_prompt]
            conditions["negative"] = _conditions(model, request, negatives, negatives * request.num_rows, name)
        sampled = sample_latents(
            model.velocity,
            request,
            name,
            latent_shape=model.latent_shape(wanted.sampling),
            conditions=conditions,
            device=model.device,
        )
        media = model.decode(sampled.trajectory.final) if wanted.sampling.decode else None
    return latent_track(
        request, name, sampled=sampled, conditions=conditions, media=media, version=request.policy_version
    )


def sample_text(model: TextModel, request: Request, name: str) -> Track:
    """One text track of a request, generated with the model as it is."""
    wanted = request.text(name)
    generated = generate_text(model, wanted)
    texts = visible_texts(model, generated.tokens, wanted.sampling)
    return text_track(request, name, generated=generated, texts=texts, version=request.policy_version)


def _conditions(
    model: DiffusionModel, request: Request, distinct: list[str], prompts: tuple[str, ...] | list[str], name: str
) -> Conditions:
    values = model.encode(distinct, sampling=request.latent(name).sampling)
    index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=model.device)
    return Conditions(values=values, index=index)
