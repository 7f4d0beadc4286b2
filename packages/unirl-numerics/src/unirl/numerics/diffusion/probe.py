"""The probe request, with which an external engine is tested at start-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.core.roles import DiffusionModel
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig

from ..noise import INITIAL, noise, noise_digest
from .denoise import all_positions
from .request import plan_latents

__all__ = ["probe_request"]

PROMPTS = ("a red ring", "a red ring", "a blue square on the left")
SEED, ROLLOUT = 20_011, 7


def probe_request(model: DiffusionModel, *, kernel: str = "flow-sde") -> Request:
    """A small request of three samples, two of one prompt, in which no setting has a default or usual value.

    Size and prompt length are those of the model's miniature, which every checkpoint supports. The digests of both
    initial latents are sent along. Raises ValueError for a model without a latent track or a miniature.
    """
    tracks = [name for name, kind in model.spec.tracks.items() if kind == "latent"]
    if len(tracks) != 1 or model.spec.tiny is None:
        raise ValueError(f"probe: model {model.spec.name!r} has no miniature, or not one latent track, but {tracks}.")
    known = {item.name for item in dataclasses.fields(LatentSamplingConfig)}
    size: dict[str, Any] = {key: value for key, value in model.spec.tiny.sampling.items() if key in known}
    sampling = dataclasses.replace(
        LatentSamplingConfig(**size),
        num_inference_steps=4,
        fps=model.spec.fps,
        guidance_scale=1.75,
        negative_prompt="noise",
        kernel=kernel,
        eta=0.55,
        sde=SdeStepsConfig(mode="fixed", steps=[1, 2]),
    )
    sample_ids = tuple(f"probe/{number}" for number in range(len(PROMPTS)))
    shape = model.latent_shape(sampling)
    expected = plan_latents(
        sampling,
        # Not from a schedule: sigmas computed by the engine itself would differ.
        sigmas=model.schedule(sampling) ** 1.125,
        latent_shape=shape,
        seed=SEED,
        rollout=ROLLOUT,
        sample_ids=sample_ids,
        group_ids=sample_ids,
    )
    initial = noise(seed=SEED, rollout=ROLLOUT, ids=sample_ids, step=INITIAL, shape=shape)
    keep = all_positions(len(sample_ids), num_steps=sampling.num_inference_steps)
    expected = dataclasses.replace(expected, initial_noise=noise_digest(initial), keep=keep)
    nothing: Mapping[str, Any] = {}
    return Request(
        track=tracks[0],
        sample_ids=sample_ids,
        group_ids=sample_ids,
        inputs=Inputs.of_texts(PROMPTS),
        metadata=(nothing,) * len(PROMPTS),
        params=expected,
        seed=SEED,
        rollout=ROLLOUT,
        policy_version=0,
    )
