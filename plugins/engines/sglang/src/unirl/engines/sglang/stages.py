"""SGLang's pipeline stages, adapted for rollouts: all inputs are read from the piece of the rollout's request that came
along, and `unirl.numerics` computes each step inside SGLang's own loop.

Runs in SGLang's environment. The classes here have no constructor state: an existing stage of SGLang is converted by
assigning its `__class__`, and gets `pipeline_of`, which returns the pipeline.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.serial import from_bytes
from unirl.core.types.track import Conditions
from unirl.engine_host.latent_rows import rows_of
from unirl.engine_host.received_media import read_media
from unirl.numerics.diffusion.denoise import Walk
from unirl.numerics.diffusion.rollout import latent_walk
from unirl.numerics.diffusion.sampler import guidance_of
from unirl.numerics.noise import noise_digest

from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGPolicy
from sglang.multimodal_gen.runtime.pipelines_core.diffusion_scheduler_utils import clone_scheduler_runtime
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    DecodingStage,
    DenoisingStage,
    ImageEncodingStage,
    ImageVAEEncodingStage,
    InputValidationStage,
    LatentPreparationStage,
    TextEncodingStage,
    TimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.validators import VerificationResult
from sglang.multimodal_gen.runtime.post_training.flow_rollout_controller import FlowRolloutController
from sglang.multimodal_gen.runtime.post_training.rollout_hooks import prepare_rollout_if_enabled, rollout_step_kwargs

__all__ = ["PIECE", "ROWS", "STAGES"]

PIECE = "unirl_request"
"""Key of a request's extras: rows of the rollout's request that share a prompt, first as bytes, then decoded."""
WALK = "unirl_walk"
"""Key of a request's extras: the sampler state, and the digests of the initial noise."""
SOURCES = "unirl_sources"
"""Key of a request's extras: hashes of the media that were encoded, and their conditions."""
ROWS = "unirl_rows"
"""Attribute of SGLang's trajectory data: what `rows_of` gives for each row."""


def _piece(batch: Any) -> Request:
    """The rows of a request of SGLang. Raises ValueError when SGLang did not pass them on."""
    result = batch.extra.get(PIECE)
    if result is None:
        raise ValueError(f"SGLang passed a request on without its {PIECE!r}: it dropped extra.")
    if isinstance(result, bytes):
        result = batch.extra[PIECE] = from_bytes(result, Request)
    return result


def _sampling(batch: Any) -> LatentSamplingConfig:
    """How they are sampled."""
    return _piece(batch).latent.sampling


class Reading(InputValidationStage):
    """Copies the settings of the piece to where SGLang's stages read them."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        piece = _piece(batch)
        sampling = piece.latent.sampling
        batch.prompt, batch.negative_prompt = piece.inputs.texts[0], sampling.negative_prompt
        batch.num_outputs_per_prompt = piece.num_rows
        batch.height, batch.width, batch.num_frames = sampling.height, sampling.width, sampling.frames
        batch.num_inference_steps = len(piece.latent.sigmas) - 1
        batch.guidance_scale, batch.guidance_rescale = sampling.guidance_scale, 0.0
        batch.do_classifier_free_guidance = len(guidance_of(piece.latent.sampler).branches) > 1
        return super().forward(batch, server_args)


class Encoding(TextEncodingStage):
    """Pads for each encoder to the model's number of tokens; SGLang uses one number for all."""

    unirl_lengths: Any = None

    def forward(self, batch: Any, server_args: Any) -> Any:
        bridge = self.pipeline_of().bridge
        self.unirl_lengths = bridge.encoder_lengths(self.tokenizers, _sampling(batch))
        return super().forward(batch, server_args)

    def encode_text(self, text: Any, server_args: Any, encoder_index: Any = None, **settings: Any) -> Any:
        settings.pop("max_length", None)
        each = [
            super(Encoding, self).encode_text(
                text, server_args, encoder_index=[at], max_length=self.unirl_lengths[at], **settings
            )
            for at in encoder_index
        ]
        # A tuple of lists, with an entry for each encoder that has one.
        return tuple([one for result in part for one in result] for part in zip(*each, strict=True))


class PromptsWithImages(ImageEncodingStage):
    """Left to the stage for media, so there is nothing to verify."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        return batch

    def verify_input(self, batch: Any, server_args: Any) -> VerificationResult:
        return VerificationResult()

    def verify_output(self, batch: Any, server_args: Any) -> VerificationResult:
        return VerificationResult()


class Sources(ImageVAEEncodingStage):
    """The media of the piece, encoded by the bridge as in training: SGLang scales images in its own way."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        media = read_media(_piece(batch).inputs.media[0])
        if media:
            pipeline = self.pipeline_of()
            with torch.no_grad():
                conditions = pipeline.bridge.encode_media(pipeline, batch, media, _sampling(batch))
            batch.extra[SOURCES] = [ref.uri for ref in media], conditions
        return batch


class Schedule(TimestepPreparationStage):
    """The sigmas of the piece, bit for bit."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        device = get_local_torch_device()
        sigmas = _piece(batch).latent.sigmas.to(device=device, dtype=torch.float32)
        batch.scheduler = clone_scheduler_runtime(self.scheduler)
        batch.scheduler.sigmas = sigmas
        timesteps = sigmas[:-1] * batch.scheduler.config.num_train_timesteps
        if (pipeline := self.pipeline_of()).bridge.rounds_timesteps:
            timesteps = timesteps.to(next(pipeline.get_module(pipeline.bridge.modules[0]).parameters()).dtype)
        batch.scheduler.timesteps = timesteps
        batch.timesteps = batch.scheduler.timesteps
        # With both set, SGLang computes neither.
        return super().forward(batch, server_args)


class Latents(LatentPreparationStage):
    """The initial noise of the piece."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        piece = _piece(batch)
        bridge = self.pipeline_of().bridge
        frames = self.get_forward_latent_num_frames(batch, server_args)
        shape = bridge.latent_shape(server_args.pipeline_config.prepare_latent_shape(batch, piece.num_rows, frames)[1:])
        walk = latent_walk(piece, latent_shape=shape, device=get_local_torch_device())
        batch.latents = bridge.packed(walk.x)
        batch.extra[WALK] = walk
        batch = super().forward(batch, server_args)
        if batch.latent_ids is None:
            # SGLang leaves out the positions of latents that it was given packed.
            ids = server_args.pipeline_config.maybe_prepare_latent_ids(walk.x)
            batch.latent_ids = None if ids is None else ids.to(walk.x.device)
        return batch


@dataclass
class Guided(CFGPolicy):
    """SGLang's guidance branches, combined by `unirl.numerics` in fp32, as in training."""

    walk: Walk | None = None

    def combine(self, predictions: Any, *others: Any, **named: Any) -> Tensor:
        walk = self.walk
        assert walk is not None
        # SGLang packs the latents of some models, which moves the channel dim, as the guidance sees by their rank.
        branches = ("positive", "negative")[: len(predictions)]
        velocities: dict[str, Tensor] = dict(zip(branches, (one.float() for one in predictions), strict=True))
        return walk.guidance.combine(velocities, walk.sigmas[walk.step].expand(len(predictions[0])))


class Denoising(DenoisingStage):
    """SGLang's denoising loop around UniRL's steps."""

    def _prepare_denoising_loop(self, batch: Any, server_args: Any) -> Any:
        context = super()._prepare_denoising_loop(batch, server_args)
        walk: Walk = batch.extra[WALK]
        # SGLang's own scale, so that the rollout reports it if SGLang changed it.
        walk.guidance = replace(walk.guidance, scale=float(batch.guidance_scale))
        context.cfg_policy = Guided(branches=context.cfg_policy.branches, walk=walk)
        prepare_rollout_if_enabled(
            batch=batch,
            pipeline_config=server_args.pipeline_config,
            build_controller=partial(_walk_controller, self.pipeline_of().bridge),
        )
        context.extra_step_kwargs.update(rollout_step_kwargs(batch))
        return context

    def _denoise(self, batch: Any, server_args: Any) -> Any:
        piece, sampling, pipeline = _piece(batch), _sampling(batch), self.pipeline_of()
        walk: Walk = batch.extra[WALK]
        bridge = pipeline.bridge
        initial = noise_digest(bridge.unpacked(batch.latents, walk.x.shape[1:]))
        batch = super()._denoise(batch, server_args)
        del batch.extra[WALK]
        last = server_args.pipeline_config.post_denoising_loop(bridge.packed(walk.x), batch)
        if not torch.equal(batch.latents, last):
            raise RuntimeError("SGLang decodes other latents than those of the last step.")
        data = batch.rollout_trajectory_data
        env = data.denoising_env
        sources, of_media = batch.extra.get(SOURCES, ([], {}))
        conditions = {
            kind: _conditions(bridge.conditions(arguments, sampling), of_media, piece)
            for kind, arguments in (("positive", env.pos_cond_kwargs), ("negative", env.neg_cond_kwargs))
            if arguments
        }
        rows = rows_of(
            piece,
            segment=walk.segment(initial_noise=initial),
            conditions=conditions,
            media=None,
            texts=(batch.prompt,) * piece.num_rows,
            negative_prompt=batch.negative_prompt if "negative" in conditions else None,
            sources={kind: [sources] * piece.num_rows for kind in conditions},
            version=pipeline.unirl_version,
        )
        # The rows already hold the conditions.
        data.denoising_env = None
        setattr(data, ROWS, rows)
        return batch


class Decoding(DecodingStage):
    """Decodes media only if the request asks for them."""

    def forward(self, batch: Any, server_args: Any) -> Any:
        if _sampling(batch).decode:
            return super().forward(batch, server_args)
        return OutputBatch(rollout_trajectory_data=batch.rollout_trajectory_data, metrics=batch.metrics)


class WalkController(FlowRolloutController):
    """Replaces SGLang's sampling steps with UniRL's kernels, noise and bookkeeping."""

    walk: Walk
    bridge: Any

    def flow_sde_sampling(
        self,
        batch: Any,
        model_output: Tensor,
        sample: Tensor,
        current_sigma: Tensor,
        next_sigma: Tensor,
        step_index: int,
    ) -> Tensor:
        walk = self.walk
        used, asked = (current_sigma, next_sigma), tuple(walk.sigmas[walk.step : walk.step + 2])
        same = step_index == walk.step and all(bool(one == other) for one, other in zip(used, asked, strict=True))
        if not same or not torch.equal(sample, self.bridge.packed(walk.x)):
            raise RuntimeError(
                f"SGLang is at step {step_index}, from sigma {float(used[0])} to {float(used[1])}; the request is at "
                f"step {walk.step}, from {float(asked[0])} to {float(asked[1])}, or its latents were changed."
            )
        walk.advance(self.bridge.unpacked(model_output, walk.x.shape[1:]))
        # SGLang's own table of log-probs has a column for every step; ours only for the stochastic ones.
        nothing = torch.zeros(len(sample))
        self.append_local_rollout_log_probs(nothing, nothing + 1)
        return self.bridge.packed(walk.x)


def _walk_controller(bridge: Any, *, batch: Any, pipeline_config: Any) -> WalkController:
    controller = WalkController(
        sde_type="sde",
        noise_level=0.0,
        log_prob_no_const=True,
        debug_mode=False,
        sde_step_indices=None,
        generator=batch.generator,
        return_dit_trajectory=False,
        return_step_indices=None,
        shard_for_sp=_unsharded,
        gather_for_sp=_unsharded,
        sigmas=batch.scheduler.sigmas,
        latents_shape=tuple(batch.latents.shape),
    )
    controller.walk, controller.bridge = batch.extra[WALK], bridge
    return controller


def _unsharded(batch: Any, latents: Tensor) -> Tensor:
    return latents


def _conditions(found: Mapping[str, Ragged], of_media: Mapping[str, Ragged], piece: Request) -> Conditions:
    """All rows share the prompt and its media, and so the embedding."""
    values = {name: value[:1] for name, value in (*found.items(), *of_media.items())}
    return Conditions(values=values, index=torch.zeros(piece.num_rows, dtype=torch.int64))


_OWN = (Reading, Encoding, PromptsWithImages, Sources, Schedule, Latents, Denoising, Decoding)
STAGES: Mapping[type, type] = {cls.__base__: cls for cls in _OWN}
"""Stage of SGLang -> its rollout counterpart."""
