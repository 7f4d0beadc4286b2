"""The in-process engine: encodes, denoises and decodes, or generates text, with the model being trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Model, WeightReceipt, WeightUpdate, diffusion_model, text_model
from unirl.core.specs.check import check_config
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.track import Conditions, LatentSegment, Track
from unirl.model_host.diffusion.pipeline_model import PipelineModel
from unirl.numerics.diffusion.rollout import as_media, branch_inputs, latent_track, sample_latents
from unirl.numerics.not_finite import first_not_finite
from unirl.numerics.tokens.rollout import GeneratedText, completion_media, generate_text, text_track

from .config import NO_GPU, TrainsideConfig
from .input_cache import InputCache
from .plugin import SPEC

__all__ = ["TrainsideEngine", "build"]


def build(config: TrainsideConfig, *, model: Model, device: Any) -> TrainsideEngine:
    """The engine over `model`. Raises RecipeError for a setting out of range, a model on another device, and idle parts
    that cannot be offloaded."""
    check_config(config, key="engine")
    if torch.device(device) != torch.device(model.device):
        raise RecipeError(
            f"engine: got device {device!s}, but the model is on {model.device!s}; trainside samples on the "
            "training device."
        )
    if config.offload_idle:
        if torch.device(device).type == "cpu":
            raise RecipeError(f"engine.offload_idle: got true on a CPU; {NO_GPU}")
        if not isinstance(model, PipelineModel):
            raise RecipeError(
                f"engine.offload_idle: got true, but model {model.spec.name!r} does not keep encoders and VAE apart "
                "from what it trains. Leave it out."
            )
        model.offload_idle()
    return TrainsideEngine(config, model=model)


class TrainsideEngine:
    """A `unirl.core.roles.Engine` that shares the trained module's weights.

    The owner of the weights sets `version` before each request.
    """

    def __init__(self, config: TrainsideConfig, *, model: Model) -> None:
        self.version = 0
        self._model = model
        self._forward_batch = config.forward_batch
        self._encoded = InputCache(model, size=config.cached_prompts)

    def generate(self, request: Request) -> Track:
        """The track of the request, without gradient and in evaluation mode, which is undone afterwards.

        Raises RecipeError for an unknown track and kernels not in the spec, and RunFailed, with the first layer whose
        output is not finite, for logits or latents that are not.
        """
        self._check(request)
        with torch.no_grad(), _evaluating(self._model.trainable):
            return self._text(request) if isinstance(request.params, TextRequest) else self._latents(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Always raises: the engine samples from the trained module and has no copy to load into."""
        raise RecipeError(
            f"engine: got weights of version {update.version}, but 'trainside' shares the trained module's weights. "
            "Set its `version` instead, or choose an engine that loads weights."
        )

    def sleep(self) -> None:
        """No-op: between rollouts the engine uses only the model's memory, which training needs."""

    def wake(self) -> None:
        """No-op, as `sleep` releases nothing."""

    def close(self) -> None:
        """Drop the cached embeddings. The model belongs to the caller and stays."""
        self._encoded = InputCache(self._model, size=0)

    def _check(self, request: Request) -> None:
        known, expected = self._model.spec.tracks, request.params
        kind = "text" if isinstance(expected, TextRequest) else "latent"
        if kind not in known.values():
            raise RecipeError(
                f"sampling: got {kind} track {request.track!r}, but model {self._model.spec.name!r} has "
                f"{', '.join(f'{track} ({result})' for track, result in sorted(known.items()))}."
            )
        kernel = "" if isinstance(expected, TextRequest) else expected.sampling.kernel
        if kernel and kernel not in SPEC.kernels and ":" not in kernel:
            raise RecipeError(f"sampling.kernel: got {kernel!r}; trainside supports {', '.join(SPEC.kernels)}.")

    def _text(self, request: Request) -> Track:
        model, sampling = text_model(self._model), request.text.sampling
        module: Any = self._model.trainable
        anyone = _on_any_rank if isinstance(module, FSDPModule) and dist.is_initialized() else bool
        conditions: Conditions | None = None
        if model.spec.reads_media("text"):
            conditions = self._encoded.conditions(request.inputs, sampling=sampling)
        generated: list[GeneratedText] = []
        start = 0
        for piece in request.text.chunks(self._forward_batch):
            rows = range(start, start + piece.num_rows)
            start += piece.num_rows
            own = None if conditions is None else conditions.select(rows)
            generated.append(generate_text(model, piece, conditions=own, anyone=anyone))
        whole = GeneratedText.concat(generated)
        media = completion_media(model, whole.tokens, request)
        return text_track(request, generated=whole, media=media, version=self.version, conditions=conditions)

    def _latents(self, request: Request) -> Track:
        model = diffusion_model(self._model)
        sampling = request.latent.sampling
        conditions = {
            branch: self._encoded.conditions(inputs, sampling=sampling)
            for branch, inputs in branch_inputs(request).items()
        }
        sampled: list[LatentSegment] = []
        media: list[torch.Tensor] = []
        start = 0
        for piece in request.chunks(self._forward_batch):
            rows = range(start, start + piece.num_rows)
            start += piece.num_rows
            sample = partial(
                sample_latents,
                model.velocity,
                piece,
                latent_shape=model.latent_shape(sampling),
                conditions={key: value.select(rows) for key, value in conditions.items()},
                device=model.device,
            )
            part = sample()
            if not bool(part.final.isfinite().all()):
                why = first_not_finite(model.trainable, sample)
                raise RunFailed(f"model {model.spec.name!r}: latents are not finite{why}")
            sampled.append(part)
            if sampling.decode:
                decoded = model.decode(part.final)
                if not bool(decoded.isfinite().all()):
                    raise RunFailed(
                        f"model {model.spec.name!r}: latents are finite, and what its VAE decodes them to is not. Use "
                        "model.vae_dtype=float32, or a checkpoint whose VAE has finite weights."
                    )
                media.append(as_media(decoded, request))
        return latent_track(
            request,
            segment=LatentSegment.concat(sampled),
            conditions=conditions,
            media=torch.cat(media) if media else None,
            policy_version=(self.version,) * request.num_rows,
        )


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; restores each submodule's mode afterwards, also on an error."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _on_any_rank(goes_on: bool) -> bool:
    """Whether any rank still generates: a forward of a sharded model needs all ranks."""
    result = torch.tensor(int(goes_on), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return bool(result)
