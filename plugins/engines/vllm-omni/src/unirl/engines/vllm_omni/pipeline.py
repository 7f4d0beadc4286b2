"""Rollout pipelines for vLLM-Omni: UniRL's denoising loop, kernels and noise around vLLM-Omni's transformer, and its
token loop for models that also write.

Runs in the engine's environment. vLLM-Omni schedules and batches requests, one per sample. Each carries a piece of
the rollout's request, the only source of settings and inputs. vLLM-Omni calls `forward` with a whole batch, or, with
continuous batching, the four methods that follow.
"""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.core.types.batch import join
from unirl.core.types.inputs import Inputs, distinct
from unirl.core.types.request import Request
from unirl.core.types.serial import from_bytes
from unirl.core.types.track import Conditions
from unirl.engine_host.cpu_experts import keep_experts
from unirl.engine_host.latent_rows import rows_of
from unirl.engine_host.received_media import echoed, read_media, read_turns
from unirl.numerics.diffusion.denoise import Walk, finish
from unirl.numerics.diffusion.guidance import guided_velocity
from unirl.numerics.diffusion.rollout import branch_inputs, latent_walk
from unirl.numerics.noise import noise_digest
from unirl.numerics.pixels import levels
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.request import OmniDiffusionRequest

from .bridge import SequenceBridge
from .texts import TEXTS, written

if TYPE_CHECKING:
    from unirl.core.types.sampling import LatentSamplingConfig

    from .bridge import Bridge, TextBridge

__all__ = ["PIECE", "ROW", "RolloutPipeline", "Rollouts", "resolve"]

PIECE = "unirl_request"
"""Key of a request's extra arguments: the piece of the rollout's request, as bytes."""
ROW = "unirl"
"""Key of an output's trajectory: the row of the piece, or what came of all completions."""
UNSYNCED = -1
UNDERWAY, WRITTEN = "unirl", "unirl_texts"
"""Keys of the state that vLLM-Omni keeps for a request between steps: of rows, and of the output for completions."""


class Rollouts:
    """The class named in `custom_pipeline_args`: calling it creates the model's pipeline with rollouts."""

    supports_request_batch = True
    """Read from the class, before a pipeline exists."""

    def __new__(cls, *, od_config: Any, prefix: str = "") -> Any:
        bridge = resolve(od_config.custom_pipeline_args["bridge"])
        stock = resolve(bridge.pipeline)
        given = od_config.custom_pipeline_args
        own = {"bridge": bridge, "unirl_settings": given["settings"], "unirl_folder": given["folder"]}
        return type(f"Rollout{stock.__name__}", (RolloutPipeline, stock), own)(od_config=od_config)


def resolve(name: str) -> Any:
    """The object that `"module:attribute"` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(kw_only=True)
class Underway:
    """Rows that are denoised together from x_T."""

    request: Request
    sampling: LatentSamplingConfig
    walk: Walk
    initial_noise: tuple[str, ...]
    conditions: Mapping[str, Conditions]
    prefilled: Mapping[str, Conditions]
    """Arguments of the velocity: the conditions, or what the bridge computed from them with these weights."""
    sources: Mapping[str, Sequence[Sequence[str]]]
    """For each branch of the guidance and each row what was encoded besides the text, see `echoed`."""
    version: int
    """Version of the weights at the first step."""
    num_rows: int
    """Size of the largest batch that they were part of."""

    def values(self, branch: str) -> Mapping[str, Ragged]:
        """Name -> one entry per row, for the velocity."""
        return self.prefilled[branch].expanded()


class RolloutPipeline:
    """Mixed into a pipeline class of vLLM-Omni, so its names begin with `unirl_`."""

    supports_request_batch = True
    supports_step_execution = True
    bridge: Bridge
    unirl_settings: Mapping[str, Any]
    """See `Bridge.settings`."""
    unirl_folder: str
    """Of a checkpoint without `model_index.json`, else ""."""
    unirl_version = UNSYNCED
    """Policy version of the weights in use."""
    unirl_torn = ""
    """Why the weights match no version; empty if they do."""
    unirl_adapter: Any = None
    """The adapter being loaded: a `LoRAModel` and its `PEFTHelper`."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        if current_platform.is_cpu():
            # Otherwise vLLM computes with copies of the weights packed for oneDNN, and empties the originals. The
            # flag has another name in vLLM 0.30.
            for layer in cast(Any, self).modules():
                if isinstance(layer, LinearBase):
                    layer._cpu_skip_gemm_dispatch = layer.skip_weight_relayout = True
            keep_experts()

    def forward(self, req: Any) -> list[Any]:
        """One output per request of a batch, in its order."""
        if req.is_dummy_run():
            # vLLM-Omni's warm-up, which needs all components in one dtype. The probe at start-up is a full rollout.
            return [DiffusionOutput() for _ in req.requests]
        asked = [_texts(parameters) for parameters in req.sampling_params_list]
        if any(asked):
            # A call of the engine has either, and waits for its own.
            return [self._written(texts) for texts in asked]
        rows = self._begun(Request.concat([_piece(parameters) for parameters in req.sampling_params_list]))
        finish(rows.walk, self._velocity, conditions={branch: rows.values(branch) for branch in rows.conditions})
        return self._ended(rows)

    def prepare_encode(self, state: Any, **_: Any) -> Any:
        """Begin one request. vLLM-Omni needs its latent and number of steps."""
        if OmniDiffusionRequest.is_dummy_run_request_id(state.request_id):
            state.latents = state.timesteps = torch.zeros(1)
            return state
        if texts := _texts(state.sampling):
            # All at once: completions join and leave the batch of their own loop.
            state.extra[WRITTEN] = self._written(texts)
            state.latents = state.timesteps = torch.zeros(1)
            return state
        row = state.extra[UNDERWAY] = self._begun(_piece(state.sampling))
        state.latents, state.timesteps = row.walk.x, row.walk.sigmas[:-1]
        return state

    def denoise_step(self, input_batch: Any, *, states: Sequence[Any], **_: Any) -> Tensor:
        """Velocities [N, ...] of requests, each at its own step."""
        rows = [state.extra[UNDERWAY] for state in states if UNDERWAY in state.extra]
        if not rows:
            return input_batch.latents
        guidance = rows[0].walk.guidance
        assert all(row.walk.guidance == guidance for row in rows), "requests of two rollouts are in one batch"
        for row in rows:
            row.num_rows = max(row.num_rows, len(rows))
        return guided_velocity(
            self._velocity,
            torch.cat([row.walk.x for row in rows]),
            torch.stack([row.walk.sigmas[row.walk.step] for row in rows]),
            conditions={branch: _joined([row.values(branch) for row in rows]) for branch in guidance.branches},
            guidance=guidance,
        )

    def step_scheduler(self, state: Any, noise_pred: Tensor, **_: Any) -> None:
        """Advance one request by one step, given its velocity."""
        if UNDERWAY in state.extra:
            walk = state.extra[UNDERWAY].walk
            walk.advance(noise_pred)
            state.latents = walk.x
        state.step_index += 1

    def post_decode(self, state: Any, **_: Any) -> Any:
        """The output of a finished request."""
        if UNDERWAY in state.extra:
            return self._ended(state.extra[UNDERWAY])[0]
        return state.extra.get(WRITTEN) or DiffusionOutput()

    def _written(self, texts: bytes) -> Any:
        """The output for all completions of a call."""
        self._refuse_torn()
        result = written(cast("TextBridge", self.bridge).decoder(self), texts)
        return _output({**result, "version": self.unirl_version})

    def _refuse_torn(self) -> None:
        if self.unirl_torn:
            raise RuntimeError(f"cannot generate with these weights: {self.unirl_torn}")

    def _begun(self, request: Request) -> Underway:
        self._refuse_torn()
        sampling = request.latent.sampling
        shape = self.bridge.latent_shape(self, sampling)
        walk = latent_walk(request, latent_shape=shape, device=get_local_device())
        encoded = {branch: self._encoded(inputs, sampling) for branch, inputs in branch_inputs(request).items()}
        conditions = {branch: own for branch, (own, _) in encoded.items()}
        return Underway(
            request=request,
            sampling=sampling,
            walk=walk,
            initial_noise=noise_digest(walk.x),
            conditions=conditions,
            prefilled={branch: self._prefilled(own) for branch, own in conditions.items()},
            sources={branch: own for branch, (_, own) in encoded.items()},
            version=self.unirl_version,
            num_rows=request.num_rows,
        )

    def _velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return self.bridge.velocity(self, x, sigma, conditions)

    def _ended(self, rows: Underway) -> list[Any]:
        """One output per row."""
        if rows.version != self.unirl_version:
            raise RuntimeError(f"weights changed to {self.unirl_version} while generating with {rows.version}.")
        sampling = rows.sampling
        result = rows_of(
            rows.request,
            segment=rows.walk.segment(initial_noise=rows.initial_noise),
            conditions=rows.conditions,
            media=levels(self.bridge.decode(self, rows.walk.x)) if sampling.decode else None,
            texts=rows.request.inputs.texts,
            negative_prompt=sampling.negative_prompt if "negative" in rows.conditions else None,
            sources=rows.sources,
            version=rows.version,
        )
        return [_output({**row, "rows": rows.num_rows}, ndim=rows.walk.x.ndim) for row in result]

    def _encoded(self, inputs: Inputs, sampling: LatentSamplingConfig) -> tuple[Conditions, list[list[str]]]:
        """The conditions of the rows, and what each was encoded from besides its text, see `echoed`.

        Each input is encoded alone: its embedding then does not depend on the batch, and can come from vLLM-Omni's
        cache.
        """
        rows, index = distinct(inputs)
        each: list[Mapping[str, Ragged]] = []
        sources: list[list[str]] = []
        for row in rows:
            media, text = read_media(inputs.media[row]), inputs.texts[row]
            turns = () if inputs.turns is None else read_turns(inputs.turns[row])
            sources.append(echoed(media, turns))
            if isinstance(self.bridge, SequenceBridge):
                own = replace(inputs.select([row]), media=(media,), turns=None if inputs.turns is None else (turns,))
                each.append(self.bridge.encode_sequence(self, own, sampling))
            elif turns:
                raise RuntimeError(f"got turns for {text!r}, but the bridge does not continue sequences.")
            elif media:
                each.append(self.bridge.encode_with_media(self, text, media, sampling))
            else:
                each.append(self.bridge.encode(self, text, sampling))
        conditions = Conditions(values=_joined(each), index=torch.tensor(index, device=get_local_device()))
        return conditions, [sources[at] for at in index]

    def _prefilled(self, conditions: Conditions) -> Conditions:
        if not isinstance(self.bridge, SequenceBridge):
            return conditions
        return replace(conditions, values=self.bridge.prefilled(self, conditions.values))

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: Any) -> Any:
        """Called by vLLM-Omni before it looks for an adapter on disk."""
        return self.unirl_adapter


def _output(row: Mapping[str, Any], *, ndim: int = 4) -> Any:
    """ndim: 4 of an image, 5 of a video."""
    # Returned as images, they would pass through the pipeline's postprocessing to 8 bits or PIL. A trajectory is
    # returned unchanged in every version, but only together with an image or a video, hence the empty one.
    return DiffusionOutput(torch.zeros(1, 3, *(1,) * (ndim - 4), 8, 8), trajectory_latents={ROW: row})


def _texts(parameters: Any) -> bytes:
    """The completions that a request asks for, as a frame; empty for a piece of latents."""
    return (parameters.extra_args or {}).get(TEXTS, b"")


def _piece(parameters: Any) -> Request:
    result = (parameters.extra_args or {}).get(PIECE)
    if result is None:
        raise ValueError(f"vLLM-Omni passed a request on without its {PIECE!r}: it dropped extra_args.")
    return from_bytes(result, Request)


def _joined(each: Sequence[Mapping[str, Ragged]]) -> dict[str, Ragged]:
    return {name: join(name, [one[name] for one in each]) for name in each[0]}
