"""What is put into vLLM-Omni's pipeline: rollouts by UniRL's denoise loop, kernels and noise, around its transformer.

Runs in the engine's environment. vLLM-Omni schedules and batches requests, one a sample; every request carries a piece
of the rollout's request, and what is computed with is read from there and from nowhere else.
"""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from unirl.core.request import Request
from unirl.core.serial import from_bytes
from unirl.core.track import Conditions
from unirl.numerics.latent_rollout import sample_latents
from unirl.numerics.latent_rows import rows_of
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from vllm_omni.diffusion.data import DiffusionOutput

if TYPE_CHECKING:
    from unirl.core.config import LatentSamplingConfig

    from .bridge import Bridge

__all__ = ["PIECE", "ROW", "RolloutPipeline", "Rollouts", "resolve"]

PIECE = "unirl_request"
"""Key of a request's extra arguments: the piece of the rollout's request, as bytes."""
ROW = "unirl"
"""Key of an output: what was made of the piece."""
UNSYNCED = -1


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


class RolloutPipeline:
    """Goes before a pipeline of vLLM-Omni. Its own names begin with `unirl_`."""

    supports_request_batch = True
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
            return super().forward(req)  # type: ignore[misc]
        if self.unirl_torn:
            raise RuntimeError(f"nothing is generated with these weights: {self.unirl_torn}")
        pieces = [_piece(parameters) for parameters in req.sampling_params_list]
        request = Request.concat(pieces)
        (track,) = request.tracks
        sampling = request.latent(track).sampling
        conditions = self._conditions(request, sampling)
        version = self.unirl_version
        found = sample_latents(
            lambda x, sigma, own: self.bridge.velocity(self, x, sigma, own),
            request,
            track,
            latent_shape=self.bridge.latent_shape(self, sampling),
            conditions=conditions,
            device=self.device,  # type: ignore[attr-defined]
        )
        media = self.bridge.decode(self, found.trajectory.final) if sampling.decode else None
        rows = rows_of(
            request,
            found=found,
            conditions=conditions,
            media=media,
            prompts=request.prompts,
            negative_prompt=sampling.negative_prompt if "negative" in conditions else None,
            guidance_scale=sampling.guidance_scale,
            version=version,
        )
        # As images they would pass through what each pipeline makes of those: 8 bits, or PIL.
        return [DiffusionOutput(custom_output={ROW: row}) for row in rows]

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
