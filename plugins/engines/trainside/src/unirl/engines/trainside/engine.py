"""The engine: encodes, denoises and decodes, or generates text, with the model object that training holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from unirl.core.errors import RecipeError
from unirl.core.request import Request, TextRequest
from unirl.core.roles import DiffusionModel, Model, TextModel, WeightReceipt, WeightUpdate
from unirl.core.rollout import Rollout
from unirl.core.track import Conditions, Track
from unirl.numerics.latent_rollout import LatentRollout, latent_track, sample_latents
from unirl.numerics.text_rollout import GeneratedText, generate_text, text_track, visible_texts

from .config import TrainsideConfig
from .plugin import SPEC
from .prompt_cache import PromptCache

__all__ = ["TrainsideEngine", "build"]


def build(config: TrainsideConfig, *, model: Model, device: Any) -> TrainsideEngine:
    """The engine over `model`. Raises RecipeError for a setting out of range or a model on another device."""
    for key, value in (("forward_batch", config.forward_batch), ("cached_prompts", config.cached_prompts)):
        if value < 0:
            raise RecipeError(f"engine.{key}: {value} was asked for; it must be 0 or more.")
    if torch.device(device) != torch.device(model.device):
        raise RecipeError(
            f"engine: device {device!s} was asked for, the model is on {model.device!s}; trainside samples where "
            "the model trains."
        )
    return TrainsideEngine(config, model=model)


class TrainsideEngine:
    """A `unirl.core.roles.Engine` without weights of its own.

    `version` belongs to whoever owns the weights: set it to theirs before each request.
    """

    def __init__(self, config: TrainsideConfig, *, model: Model) -> None:
        self.version = 0
        self._model = model
        self._forward_batch = config.forward_batch
        self._prompts = PromptCache(cast("DiffusionModel", model), size=config.cached_prompts)

    def generate(self, request: Request) -> Rollout:
        """Every track of the request, without gradient and in evaluation mode, which is undone afterwards.

        Raises RecipeError for tracks that the model does not have, kernels not in the spec and prompts with media.
        """
        self._check(request)
        with torch.no_grad(), _evaluating(self._model.trainable):
            return Rollout(
                tracks={
                    name: self._text(request, name) if isinstance(wanted, TextRequest) else self._latents(request, name)
                    for name, wanted in request.tracks.items()
                }
            )

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Refused: the engine samples from the module that trains and holds no copy to load into."""
        raise RecipeError(
            f"engine: weights of version {update.version} were sent to 'trainside', which shares the weights that "
            "train. Set its `version` instead, or choose an engine that takes weights."
        )

    def sleep(self) -> None:
        """Nothing: the only memory it uses between rollouts is the model's, which training needs."""

    def wake(self) -> None:
        """Nothing, as `sleep` gave nothing back."""

    def close(self) -> None:
        """Drop the cached embeddings. The model belongs to the caller and stays."""
        self._prompts = PromptCache(cast("DiffusionModel", self._model), size=0)

    def _check(self, request: Request) -> None:
        known = self._model.spec.tracks
        for name, wanted in request.tracks.items():
            kind = "text" if isinstance(wanted, TextRequest) else "latent"
            if known.get(name) != kind:
                raise RecipeError(
                    f"sampling: a {kind} track {name!r} was asked for; model {self._model.spec.name!r} has "
                    f"{', '.join(f'{track} ({found})' for track, found in sorted(known.items()))}."
                )
            if isinstance(wanted, TextRequest):
                continue
            kernel = wanted.sampling.kernel
            if kernel not in SPEC.kernels:
                raise RecipeError(
                    f"sampling.kernel: {kernel!r} was asked for; trainside runs {', '.join(SPEC.kernels)}."
                )
        for prompt_id, media in zip(request.prompt_ids, request.media, strict=True):
            if media:
                raise RecipeError(
                    f"data: prompt {prompt_id!r} has media ({media[0].uri}); trainside takes text prompts only."
                )

    def _text(self, request: Request, name: str) -> Track:
        model, sampling = cast("TextModel", self._model), request.text(name).sampling
        module: Any = self._model.trainable
        anyone = _on_any_rank if isinstance(module, FSDPModule) and dist.is_initialized() else bool
        pieces = [piece.text(name) for piece in request.chunks(self._forward_batch)]
        generated = GeneratedText.concat([generate_text(model, piece, anyone=anyone) for piece in pieces])
        texts = visible_texts(model, generated.tokens, sampling)
        return text_track(request, name, generated=generated, texts=texts, version=self.version)

    def _latents(self, request: Request, name: str) -> Track:
        model = cast("DiffusionModel", self._model)
        sampling = request.latent(name).sampling
        conditions: dict[str, Conditions] = {"positive": self._prompts.conditions(request.prompts, sampling=sampling)}
        if sampling.guidance_scale != 1.0:
            negatives = [sampling.negative_prompt] * request.num_rows
            conditions["negative"] = self._prompts.conditions(negatives, sampling=sampling)
        sampled: list[LatentRollout] = []
        media: list[torch.Tensor] = []
        start = 0
        for piece in request.chunks(self._forward_batch):
            rows = range(start, start + piece.num_rows)
            start += piece.num_rows
            part = sample_latents(
                model.velocity,
                piece,
                name,
                latent_shape=model.latent_shape(sampling),
                conditions={key: value.select(rows) for key, value in conditions.items()},
                device=model.device,
            )
            sampled.append(part)
            if sampling.decode:
                media.append(model.decode(part.trajectory.final))
        return latent_track(
            request,
            name,
            sampled=LatentRollout.concat(sampled),
            conditions=conditions,
            media=torch.cat(media) if media else None,
            version=self.version,
        )


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; each submodule's own mode is restored after it, also on an error."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _on_any_rank(goes_on: bool) -> bool:
    """Whether any rank goes on: a sharded model runs on all of them or on none."""
    found = torch.tensor(int(goes_on), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
