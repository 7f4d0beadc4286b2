"""Probe requests, with which an external engine is tested at start-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import DiffusionModel
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.numerics.diffusion.denoise import all_positions
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.media import LoadedImage
from unirl.numerics.noise import INITIAL, noise, noise_digest

__all__ = ["probe_request", "probe_requests"]

PROMPTS = ("a red ring", "a red ring", "a blue square on the left")
SIZES = ((64, 80), (64, 80), (96, 64))
"""Height and width of the image of each prompt, no multiples of each other's: the smallest that models take."""
SEED, ROLLOUT = 20_011, 7


def probe_requests(model: DiffusionModel) -> tuple[Request, ...]:
    """`probe_request` without media, unless the model needs some, and with media, if it takes any; the last one with
    turns, if the model continues from them."""
    track = _latent_track(model)
    uses: set[str] = set(model.spec.inputs.get(track, {}).values())
    kinds = [one for one in (False, True) if one in _kinds(uses)]
    result = [probe_request(model, has_media=one) for one in kinds]
    if track in model.spec.continues:
        result.append(probe_request(model, has_media=kinds[-1], has_turns=True))
    return tuple(result)


def _kinds(uses: set[str]) -> set[bool]:
    return {False} if not uses else ({True} if uses - {"takes"} else {False, True})


def probe_request(
    model: DiffusionModel, *, kernel: str = "flow-sde", has_media: bool = False, has_turns: bool = False
) -> Request:
    """A small request of three samples, two of one prompt, in which no setting has a default or usual value.

    Size and prompt length are those of the model's miniature, which every checkpoint supports. A checkpoint that
    refuses guidance is asked without it. The digests of both initial latents are sent along.

    has_media: give each prompt an image in memory for every role that the model has.  has_turns: give each a text of
    the model's own to continue from.
    Raises ValueError for a model without a latent track or a miniature.
    """
    track = _latent_track(model)
    assert model.spec.tiny is not None
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
    try:
        shape = model.latent_shape(sampling)
    except RecipeError as error:
        # A distilled checkpoint, which has its guidance built in.
        if not str(error).startswith("sampling.guidance_scale:"):
            raise
        sampling = dataclasses.replace(sampling, guidance_scale=1.0)
        shape = model.latent_shape(sampling)
    sample_ids = tuple(f"probe/{number}" for number in range(len(PROMPTS)))
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
    inputs = Inputs.of_texts(PROMPTS)
    if has_media:
        roles = model.spec.inputs.get(track, {})
        media = tuple(tuple(_image(*size, role=role) for role in roles) for size in _sizes(model, sampling))
        inputs = dataclasses.replace(inputs, media=media)
    if has_turns:
        turns = tuple((Turn(stage="probe", text="three", tokens=(4, 5, 3 + len(text))),) for text in PROMPTS)
        inputs = dataclasses.replace(inputs, turns=turns)
    return Request(
        track=track,
        sample_ids=sample_ids,
        group_ids=sample_ids,
        inputs=inputs,
        metadata=(nothing,) * len(PROMPTS),
        params=expected,
        seed=SEED,
        rollout=ROLLOUT,
        policy_version=0,
    )


def _sizes(model: DiffusionModel, sampling: LatentSamplingConfig) -> tuple[tuple[int, int], ...]:
    """Height and width of the image of each prompt; of first frames that are stretched, nearly in the video's ratio."""
    # By its attribute: a model may be lent through a stand-in. See `FirstFrame`.
    if getattr(model, "crops_frame", True):
        return SIZES
    height, width = sampling.height, sampling.width
    larger = (2 * height + 2, 2 * width)
    return larger, larger, (3 * height, 3 * width + 2)


def _latent_track(model: DiffusionModel) -> str:
    tracks = [name for name, kind in model.spec.tracks.items() if kind == "latent"]
    if len(tracks) != 1 or model.spec.tiny is None:
        raise ValueError(f"probe: model {model.spec.name!r} has no miniature, or not one latent track, but {tracks}.")
    return tracks[0]


def _image(height: int, width: int, *, role: str) -> LoadedImage:
    """Steep ramps that differ by channel, so that a flipped, transposed or recoloured image is another one."""
    channels, rows, columns = torch.meshgrid(torch.arange(3), torch.arange(height), torch.arange(width), indexing="ij")
    return LoadedImage.of(((7 * rows + 3 * columns + 80 * channels) % 256).float() / 255, role=role)
