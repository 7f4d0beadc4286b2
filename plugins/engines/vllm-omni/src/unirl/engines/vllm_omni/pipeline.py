"""What is put into vLLM-Omni's pipeline: rollouts by UniRL's denoise loop, kernels and noise, around its transformer.

Runs in the engine's environment. vLLM-Omni schedules and batches requests, one a sample; every request carries a piece
of the rollout's request, and what is computed with is read from there and from nowhere else. It calls `forward` with a
whole batch, or, where rows join and leave a batch between steps, the four methods that follow.
"""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from unirl.core.request import Request
from unirl.core.serial import from_bytes
from unirl.core.track import Conditions
from unirl.numerics.denoise import Walk, finished
from unirl.numerics.guidance import Guidance, guided_velocity
from unirl.numerics.latent_rollout import LatentRollout, guidance_of, latent_walk
from unirl.numerics.latent_rows import rows_of
from unirl.numerics.noise import noise_digest
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest

if TYPE_CHECKING:
    from unirl.core.config import LatentSamplingConfig

    from .bridge import Bridge

__all__ = ["PIECE", "ROW", "RolloutPipeline", "Rollouts", "resolve"]

PIECE = "unirl_request"
"""Key of a request's extra arguments: the piece of the rollout's request, as bytes."""
ROW = "unirl"
"""Key of an output's trajectory: what was made of the piece."""
UNSYNCED = -1
UNDERWAY = "unirl"
"""Key of what vLLM-Omni keeps of a request between steps."""


class Rollouts:
    """What `custom_pipeline_args` names: calling it makes vLLM-Omni's pipeline of the model, with rollouts."""

    supports_request_batch = True
    """Asked of the class, before there is a pipeline."""

    def __new__(cls, *, od_config: Any, prefix: str = "") -> Any:
        bridge = resolve(od_config.custom_pipeline_args["bridge"])
        stock = resolve(bridge.pipeline)
        return type(f"Rollout{stock.__name__}", (RolloutPipeline, stock), {"bridge": bridge})(od_config=od_config)


def resolve(name: str) -> Any:
    """What `"module:attribute"` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(kw_only=True)
class Underway:
    """Rows that are denoised together, from x_T on."""

    request: Request
    sampling: LatentSamplingConfig
    walk: Walk
    initial_noise: tuple[str, ...]
    conditions: Mapping[str, Conditions]
    guidance: Guidance
    version: int
    """Of the weights that they began with."""
    num_rows: int
    """Of the largest batch that they were in."""

    def values(self, kind: str) -> dict[str, Tensor]:
        """Name -> [rows, ...]."""
        return self.conditions[kind].expanded()


class RolloutPipeline:
    """Goes before a pipeline of vLLM-Omni. Its own names begin with `unirl_`."""

    supports_request_batch = True
    supports_step_execution = True
    bridge: Bridge
    unirl_version = UNSYNCED
    """Policy version of the weights that it computes with."""
    unirl_torn = ""
    """Why those are of no version, while it is so."""
    unirl_adapter: Any = None
    """The adapter that is being loaded: a `LoRAModel` and its `PEFTHelper`."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        if current_platform.is_cpu():
            # Else vLLM computes with copies of the weights, packed for oneDNN, and empties the weights themselves. The
            # flag has another name in vLLM 0.30.
            for layer in cast(Any, self).modules():
                if isinstance(layer, LinearBase):
                    layer._cpu_skip_gemm_dispatch = layer.skip_weight_relayout = True

    def forward(self, req: Any) -> list[Any]:
        """One output for each request of a batch, in its order."""
        if req.is_dummy_run():
            # A loop of vLLM-Omni's own, which wants all parts in one dtype. The engine's start tries a whole rollout.
            return [DiffusionOutput() for _ in req.requests]
        rows = self._begun(Request.concat([_piece(parameters) for parameters in req.sampling_params_list]))
        finished(
            rows.walk,
            self._velocity,
            conditions=rows.values("positive"),
            negatives=rows.values("negative") if rows.guidance.is_on else None,
            guidance=rows.guidance,
        )
        return self._ended(rows)

    def prepare_encode(self, state: Any, **_: Any) -> Any:
        """The beginning of one request. vLLM-Omni wants to know its latent and how many steps it takes."""
        if OmniDiffusionRequest.is_dummy_run_request_id(state.request_id):
            state.latents = state.timesteps = torch.zeros(1)
            return state
        row = state.extra[UNDERWAY] = self._begun(_piece(state.sampling))
        state.latents, state.timesteps = row.walk.x, row.walk.sigmas[:-1]
        return state

    def denoise_step(self, input_batch: Any, *, states: Sequence[Any], **_: Any) -> Tensor:
        """Velocities of requests that are each at a step of their own, [N, ...]."""
        rows = [state.extra[UNDERWAY] for state in states if UNDERWAY in state.extra]
        if not rows:
            return input_batch.latents
        guidance = rows[0].guidance
        assert all(row.guidance == guidance for row in rows), "requests of two rollouts are in one batch"
        for row in rows:
            row.num_rows = max(row.num_rows, len(rows))
        return guided_velocity(
            self._velocity,
            torch.cat([row.walk.x for row in rows]),
            torch.stack([row.walk.sigmas[row.walk.step] for row in rows]),
            conditions=_joined([row.values("positive") for row in rows]),
            negatives=_joined([row.values("negative") for row in rows]) if guidance.is_on else None,
            guidance=guidance,
        )

    def step_scheduler(self, state: Any, noise_pred: Tensor, **_: Any) -> None:
        """The step of one request, along its velocity."""
        if UNDERWAY in state.extra:
            walk = state.extra[UNDERWAY].walk
            walk.advance(noise_pred)
            state.latents = walk.x
        state.step_index += 1

    def post_decode(self, state: Any, **_: Any) -> Any:
        """What was made of one request, at its end."""
        return self._ended(state.extra[UNDERWAY])[0] if UNDERWAY in state.extra else DiffusionOutput()

    def _begun(self, request: Request) -> Underway:
        if self.unirl_torn:
            raise RuntimeError(f"nothing is generated with these weights: {self.unirl_torn}")
        (track,) = request.tracks
        sampling = request.latent(track).sampling
        shape = self.bridge.latent_shape(self, sampling)
        walk = latent_walk(request, track, latent_shape=shape, device=self.device)  # type: ignore[attr-defined]
        return Underway(
            request=request,
            sampling=sampling,
            walk=walk,
            initial_noise=noise_digest(walk.x),
            conditions=self._conditions(request, sampling),
            guidance=guidance_of(scale=sampling.guidance_scale, mode=sampling.guidance_mode, latent_rank=walk.x.ndim),
            version=self.unirl_version,
            num_rows=request.num_rows,
        )

    def _velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return self.bridge.velocity(self, x, sigma, conditions)

    def _ended(self, rows: Underway) -> list[Any]:
        """One output for each row."""
        if rows.version != self.unirl_version:
            raise RuntimeError(f"weights of version {self.unirl_version} came in the midst of version {rows.version}.")
        sampling, trajectory = rows.sampling, rows.walk.trajectory()
        found = rows_of(
            rows.request,
            found=LatentRollout(trajectory=trajectory, initial_noise=rows.initial_noise),
            conditions=rows.conditions,
            media=self.bridge.decode(self, trajectory.final) if sampling.decode else None,
            prompts=rows.request.prompts,
            negative_prompt=sampling.negative_prompt if "negative" in rows.conditions else None,
            guidance_scale=sampling.guidance_scale,
            version=rows.version,
        )
        # As images they would pass through what each pipeline makes of those: 8 bits, or PIL. As a trajectory they come
        # back as they are, in every version; but not without an image, so there is one of nothing.
        nothing = torch.zeros(1, 3, 8, 8)
        return [DiffusionOutput(nothing, trajectory_latents={ROW: {**row, "rows": rows.num_rows}}) for row in found]

    def _conditions(self, request: Request, sampling: LatentSamplingConfig) -> dict[str, Conditions]:
        found = {"positive": self._encoded(request.prompts, sampling)}
        if sampling.guidance_scale != 1.0:
            found["negative"] = self._encoded((sampling.negative_prompt,) * request.num_rows, sampling)
        return found

    def _encoded(self, prompts: tuple[str, ...], sampling: LatentSamplingConfig) -> Conditions:
        """Each prompt by itself: then its embedding does not depend on the batch, and vLLM-Omni's cache finds it."""
        distinct = list(dict.fromkeys(prompts))
        each = [self.bridge.encode(self, prompt, sampling) for prompt in distinct]
        index = torch.tensor([distinct.index(prompt) for prompt in prompts])
        values = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        return Conditions(values=values, index=index.to(self.device))  # type: ignore[attr-defined]

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: Any) -> Any:
        """What vLLM-Omni asks a pipeline for before it looks for an adapter on the disk."""
        return self.unirl_adapter


def _piece(parameters: Any) -> Request:
    found = (parameters.extra_args or {}).get(PIECE)
    if found is None:
        raise ValueError(f"vLLM-Omni passed a request on without its {PIECE!r}: it dropped extra_args.")
    return cast("Request", from_bytes(found))


def _joined(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}
