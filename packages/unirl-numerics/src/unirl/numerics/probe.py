"""The request that an engine in a process of its own is tried with at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.core.config import LatentSamplingConfig, SdeStepsConfig
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel

from .latent_request import plan_latents
from .noise import INITIAL, noise, noise_digest

__all__ = ["probe_request"]

PROMPTS = ("a red ring", "a red ring", "a blue square on the left")
SEED, ROLLOUT = 20_011, 7


def probe_request(model: DiffusionModel, *, kernel: str = "flow-sde") -> Request:
    """A request of three samples, small and short, in which nothing has a default or a usual value; two share a prompt.

    Size and length of prompts are those of the model's miniature, which every checkpoint of it takes. The digests of
    both initial latents are sent along. Raises ValueError for a model without a latent track or a miniature.
    """
    tracks = [name for name, kind in model.spec.tracks.items() if kind == "latent"]
    if len(tracks) != 1 or model.spec.tiny is None:
        raise ValueError(f"probe: model {model.spec.name!r} has no miniature, or not one latent track, but {tracks}.")
    known = {item.name for item in dataclasses.fields(LatentSamplingConfig)}
    size: dict[str, Any] = {key: value for key, value in model.spec.tiny.sampling.items() if key in known}
    sampling = dataclasses.replace(
        LatentSamplingConfig(**size),
        steps=4,
        guidance_scale=1.75,
        negative_prompt="noise",
        kernel=kernel,
        eta=0.55,
        sde=SdeStepsConfig(mode="fixed", steps=[1, 2]),
    )
    sample_ids = tuple(f"probe/{number}" for number in range(len(PROMPTS)))
    shape = model.latent_shape(sampling)
    wanted = plan_latents(
        sampling,
        # Of no schedule: sigmas that an engine makes by itself would be others.
        sigmas=model.schedule(sampling) ** 1.125,
        latent_shape=shape,
        seed=SEED,
        rollout=ROLLOUT,
        sample_ids=sample_ids,
        group_ids=sample_ids,
    )
    initial = noise(seed=SEED, rollout=ROLLOUT, ids=sample_ids, step=INITIAL, shape=shape)
    wanted = dataclasses.replace(wanted, initial_noise=noise_digest(initial), trajectory="full")
    nothing: Mapping[str, Any] = {}
    return Request(
        sample_ids=sample_ids,
        group_ids=sample_ids,
        prompt_ids=sample_ids,
        prompts=PROMPTS,
        metadata=(nothing,) * len(PROMPTS),
        media=((),) * len(PROMPTS),
        tracks={tracks[0]: wanted},
        seed=SEED,
        rollout=ROLLOUT,
        policy_version=0,
    )
