"""The dataset engine: stored images, videos, completions and pairs as the samples of a rollout."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.data.prompts import read_prompts
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.roles import DiffusionModel, Model, TextModel, WeightReceipt, WeightUpdate
from unirl.core.specs.check import check_config
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import LatentSegment, Track
from unirl.numerics.diffusion.rollout import encoded, latent_track
from unirl.numerics.media import load_image, load_video

from .config import DatasetConfig
from .plugin import SPEC
from .texts import StoredTexts

__all__ = ["DatasetEngine", "build"]

ROLES = {role for roles in SPEC.samples for role in roles}


def build(config: DatasetConfig, *, model: Model, device: Any) -> DatasetEngine:
    """The engine over `model`, whose encoders and VAE it uses. Raises RecipeError and DataError for its own file."""
    check_config(config, key="engine")
    methods = {"latent": "latents_of", "text": "completion_tokens"}
    names = sorted({methods[kind] for kind in model.spec.tracks.values()})
    # The roles' own raise, which a rollout would be late for.
    defaults = (None, DiffusionModel.latents_of, TextModel.completion_tokens)
    if all(getattr(type(model), name, None) in defaults for name in names):
        raise RecipeError(
            f"engine: got model {model.spec.name!r}, which does not implement {' or '.join(names)}; expected one that "
            "encodes stored samples."
        )
    return DatasetEngine(config, model=model)


class DatasetEngine:
    """A `unirl.core.roles.Engine` that generates nothing: the samples of a prompt are its media.

    `target` is every sample of its prompt; of `preferred` and `rejected` each is one. The owner of the weights sets
    `version` before each request, as the samples count as those of the policy that trains on them.
    """

    def __init__(self, config: DatasetConfig, *, model: Model) -> None:
        self.version = 0
        self._model, self._batch = cast("DiffusionModel", model), config.encode_batch
        self._texts = StoredTexts(cast("TextModel", model))
        self._own = _examples(Path(config.path).expanduser()) if config.path else ()

    @torch.no_grad()
    def generate(self, request: Request) -> Track:
        """The track of the request, with the latents of the stored media at the end of its schedule, or with the tokens
        of the stored completions.

        Raises DataError, with the file, for media of another size or number of frames than `sampling` states, and for
        completions that are longer than it states.
        """
        if self._own:
            request = self._drawn(request)
        if isinstance(request.params, TextRequest):
            return self._texts.track(request, version=self.version)
        refs = [_sample(request, row) for row in range(request.num_rows)]
        sampling, expected = request.latent.sampling, request.latent
        if int(expected.sde_steps.shape[1]):
            raise BatchError("engine: got stochastic steps, expected none: stored samples have none.")
        media = [_loaded(ref, sampling) for ref in refs]
        pieces = [media[start : start + self._batch] for start in range(0, len(media), self._batch)]
        latents = torch.cat([self._model.latents_of(torch.stack(piece)) for piece in pieces])
        shape = self._model.latent_shape(sampling)
        if tuple(latents.shape[1:]) != tuple(shape):
            raise DataError(
                f"engine: got latents of shape {list(latents.shape[1:])} from the VAE, expected {list(shape)}, those "
                "that the model generates."
            )
        none = torch.zeros((len(refs), 0), dtype=torch.int64, device=latents.device)
        segment = LatentSegment(
            latents=latents[:, None],
            positions=none.new_full((len(refs), 1), len(expected.sigmas) - 1),
            sde_steps=none,
            train_steps=None if expected.train_steps is None else none,
            # Nothing was sampled: these stand for the end of the schedule, which no noise and no kernel leads to.
            sigmas=expected.sigmas,
            sampler=expected.sampler,
            initial_noise=expected.initial_noise,
        )
        texts = dataclasses.replace(request.inputs, media=tuple(map(_conditions, request.inputs.media)))
        return latent_track(
            request,
            segment=segment,
            conditions={"positive": encoded(self._model, texts, sampling=sampling)},
            media=torch.stack(media) if sampling.decode else None,
            policy_version=(self.version,) * request.num_rows,
        )

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Always raises: there are no weights here."""
        raise RecipeError(f"engine: got weights of version {update.version}, but 'dataset' generates nothing with any.")

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """Nothing is held; the model belongs to the caller."""

    def _drawn(self, request: Request) -> Request:
        """The request with an example of the engine's own file for each group, a function of the group and the seed."""
        chosen: list[Prompt] = []
        for group in request.group_ids:
            digest = hashlib.blake2b(f"{request.seed}:{group}".encode(), digest_size=8).digest()
            chosen.append(self._own[int.from_bytes(digest, "little") % len(self._own)])
        metadata = tuple(prompt.metadata for prompt in chosen)
        return dataclasses.replace(request, inputs=Inputs.of_prompts(chosen), metadata=metadata)


def _examples(path: Path) -> Sequence[Prompt]:
    prompts = read_prompts(path)
    for prompt in prompts:
        roles = sorted(ref.role for ref in prompt.media if ref.role in ROLES) or sorted(ROLES & prompt.metadata.keys())
        if roles not in [sorted(each) for each in SPEC.samples]:
            raise DataError(
                f"{prompt.where}: got stored samples of the roles {roles or 'none'}, expected one 'target', or one "
                "'preferred' and one 'rejected'."
            )
    return prompts


def _sample(request: Request, row: int) -> MediaRef:
    """The media that is this sample: row n of a group is the n-th of its roles."""
    by_role = {ref.role: ref for ref in request.inputs.media[row] if ref.role in ROLES}
    if "target" in by_role:
        return by_role["target"]
    number = request.sample_ids[row].rpartition("/")[2]
    order = SPEC.samples[1]
    if not number.isdigit() or int(number) >= len(order) or order[int(number)] not in by_role:
        raise DataError(
            f"sample {request.sample_ids[row]!r}: got stored samples of the roles {sorted(by_role) or 'none'}, "
            "expected one 'target', or one 'preferred' and one 'rejected' with data.samples_per_prompt=2."
        )
    return by_role[order[int(number)]]


def _conditions(media: Sequence[MediaRef]) -> tuple[MediaRef, ...]:
    """The media that a model is given besides the text, without stored samples."""
    return tuple(ref for ref in media if ref.role not in ROLES)


def _loaded(ref: MediaRef, sampling: LatentSamplingConfig) -> Tensor:
    """[3, H, W], or [F, 3, H, W] where `sampling` asks for frames, in [0, 1]."""
    expected = (sampling.frames, 3, sampling.height, sampling.width)
    if sampling.frames == 1:
        result, expected = load_image(ref), expected[1:]
    else:
        result, rate = load_video(ref)
        if sampling.fps and abs(rate - sampling.fps) > 0.01:
            raise DataError(
                f"media {ref.uri!r}: got {rate:g} frames per second, expected sampling.fps {sampling.fps:g}."
            )
    if tuple(result.shape) != expected:
        names = ["frames", "channels", "height", "width"][-len(expected) :]
        got, wanted = (
            ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True) if name != "channels")
            for sizes in (tuple(result.shape), expected)
        )
        raise DataError(
            f"media {ref.uri!r} ({ref.role}): got {got}, expected {wanted}, as sampling states. Resize the files "
            "beforehand, or change sampling."
        )
    return result
