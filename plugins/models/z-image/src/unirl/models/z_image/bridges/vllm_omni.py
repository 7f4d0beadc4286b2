# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
"""Z-Image in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names, but makes the transformer of the published
size whatever the checkpoint says; here it is made of the checkpoint's config. That transformer masks no padding, so
prompts that are padded to different lengths go through it separately.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "ZImageInVllmOmni"]

_PADDED_TO = 32
"""The transformer pads a prompt to a multiple of this."""


class ZImageInVllmOmni:
    pipeline = f"{__name__}:Pipeline"
    architecture = "ZImagePipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {"to_qkv": ("to_q", "to_k", "to_v"), "w13": ("w1", "w3")}

    def unfit(self, model: Any) -> str:
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        factor = pipeline.vae_scale_factor
        return pipeline.transformer.in_channels, sampling.height // factor, sampling.width // factor

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        length = sampling.max_sequence_length
        # Zeros where diffusers' padding would be.
        (states,) = pipeline._encode_prompt([prompt], max_sequence_length=length)
        missing = length - len(states)
        mask = torch.ones((1, len(states)), dtype=torch.bool, device=states.device)
        return {"prompt_embeds": F.pad(states, (0, 0, 0, missing))[None], "prompt_mask": F.pad(mask, (0, missing))}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        dtype = pipeline.od_config.dtype
        lengths: list[int] = conditions["prompt_mask"].sum(dim=1).tolist()
        padded = [-(-length // _PADDED_TO) for length in lengths]
        result = torch.empty_like(x)
        for own in set(padded):
            rows = [row for row, other in enumerate(padded) if other == own]
            output, _ = pipeline.transformer(
                list(x[rows].to(dtype).unsqueeze(2).unbind(0)),
                (1000.0 - sigma[rows].float() * 1000.0) / 1000.0,
                [conditions["prompt_embeds"][row, : lengths[row]].to(dtype) for row in rows],
            )
            result[rows] = -torch.stack(output).float().squeeze(2)
        return result

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        settings = pipeline.vae.config
        latents = latents.float() / settings.scaling_factor + settings.shift_factor
        decoded = pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


BRIDGE = ZImageInVllmOmni()


def __getattr__(name: str) -> Any:
    """`Pipeline`, made in vLLM-Omni's environment."""
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline()


@functools.cache
def _pipeline() -> type:
    from unittest.mock import patch

    from vllm_omni.diffusion.models.z_image import pipeline_z_image as stock
    from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

    class Pipeline(stock.ZImagePipeline):
        """With a transformer of the checkpoint's size."""

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            kind = stock.ZImageTransformer2DModel
            settings = get_transformer_config_kwargs(od_config.tf_model_config, kind)
            with patch.object(stock, "ZImageTransformer2DModel", functools.partial(kind, **settings)):
                super().__init__(od_config=od_config, prefix=prefix)

    return Pipeline
