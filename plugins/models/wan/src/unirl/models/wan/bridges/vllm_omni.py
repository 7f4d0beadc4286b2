# vLLM-Omni's pipelines are in the engine's environment alone, where type checking does not look; transformers exports
# its classes lazily.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
"""Wan in vLLM-Omni, see `unirl.engines.vllm_omni.bridge.Bridge`.

vLLM-Omni's pipeline has the components of diffusers' under the same names; its transformers take the same arguments,
fuse the projections of self-attention and name some layers otherwise. Its encoder and VAE compute in the engine's
dtype. Its own solver, shift and boundary take no part. A first frame is scaled and encoded by the code that training
runs, with vLLM-Omni's VAE and image encoder: vLLM-Omni would scale it otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..prompts import cleaned
from ..source import WanSource

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = [
    "ONE_EXPERT",
    "ONE_EXPERT_FROM_FRAME",
    "TWO_EXPERTS",
    "TWO_EXPERTS_FROM_FRAME",
    "WanFirstFrameInVllmOmni",
    "WanInVllmOmni",
]

_EPS = 1e-5
"""Epsilon of the two layer norms around the projection of image features, in diffusers and in the original code.
vLLM-Omni has 1e-6, which moves a miniature's latents by 1e-4."""


@dataclass(frozen=True)
class WanInVllmOmni:
    module: str | tuple[str, ...]
    pipeline: ClassVar[str] = "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2:Wan22Pipeline"
    architecture: ClassVar[str] = "WanPipeline"
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "to_out": ("to_out.0",),
        "ffn.net_0.proj": ("ffn.net.0.proj",),
        "ffn.net_2": ("ffn.net.2",),
        # It holds a table that is the transformer's own in training.
        "output_scale_shift_prepare": ("",),
    }

    def unfit(self, model: Any) -> str:
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        factor, rate = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        frames = 1 + (sampling.frames - 1) // rate
        return pipeline.transformer.config.out_channels, frames, sampling.height // factor, sampling.width // factor

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            cleaned(prompt, engine="vLLM-Omni"),
            do_classifier_free_guidance=False,
            max_sequence_length=sampling.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        dtype = pipeline.od_config.dtype
        # In fp32, also beside a transformer in bf16: rounded it would be off by up to 2.
        timestep = sigma.float() * 1000.0
        result = torch.empty_like(x)
        for expert, rows in self._experts(pipeline, timestep):
            if rows.any():
                own = {name: values[rows] for name, values in conditions.items()}
                arguments = {name: value.to(dtype) for name, value in self.arguments(x[rows], own).items()}
                result[rows] = expert(timestep=timestep[rows], return_dict=False, **arguments)[0].float()
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keyword arguments of one expert for its rows, except the timestep."""
        return {"hidden_states": x, "encoder_hidden_states": conditions["prompt_embeds"]}

    def _experts(self, pipeline: Any, timestep: Tensor) -> list[tuple[Any, Tensor]]:
        """Each transformer, and which rows [B] are its own. Rows of one batch may be at other steps."""
        if isinstance(self.module, str):
            return [(pipeline.transformer, torch.ones_like(timestep, dtype=torch.bool))]
        if not hasattr(pipeline, "unirl_boundary"):
            index = Path(pipeline.od_config.model) / "model_index.json"
            pipeline.unirl_boundary = json.loads(index.read_text(encoding="utf-8"))["boundary_ratio"]
        is_high = timestep >= 1000.0 * pipeline.unirl_boundary
        return [(pipeline.transformer, is_high), (pipeline.transformer_2, ~is_high)]

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        settings = pipeline.vae.config
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (settings.latents_mean, settings.latents_std)
        )
        scaled: Tensor = latents.float() * std + mean
        # One at a time, which bounds the memory.
        chunks: tuple[Tensor, ...] = torch.split(scaled.to(pipeline.vae.dtype), 1)
        videos = [pipeline.vae.decode(chunk, return_dict=False)[0] for chunk in chunks]
        media = (torch.cat(videos).float() / 2 + 0.5).clamp(0, 1)
        return media[:, :, 0] if media.shape[2] == 1 else media.transpose(1, 2)


class WanFirstFrameInVllmOmni(WanSource, WanInVllmOmni):
    pipeline = f"{__name__}:FirstFramePipeline"
    architecture = "WanImageToVideoPipeline"

    def settings(self, model: Any) -> dict[str, Any]:
        return {}

    def encode_with_media(
        self, pipeline: Any, prompt: str, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Tensor]:
        frame = self.first_frame(media, sampling, prompt=repr(prompt))
        result = self.encode(pipeline, prompt, sampling)
        with torch.no_grad():
            result["source"] = self.source(frame, sampling, vae=pipeline.vae, device=pipeline.device)
            if pipeline.transformer.config.image_dim:
                from transformers import CLIPImageProcessorPil

                self.check_length(sampling)
                # Scaled with Pillow, as in training.
                pipeline.image_processor = CLIPImageProcessorPil.from_pretrained(
                    f"{pipeline.od_config.model}/image_processor", local_files_only=True, trust_remote_code=False
                )
                result["image_embeds"] = pipeline.encode_image(frame)
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = super().arguments(x, conditions)
        result["hidden_states"] = torch.cat([x, conditions["source"].to(x)], dim=1)
        if "image_embeds" in conditions:
            result["encoder_hidden_states_image"] = conditions["image_embeds"]
        return result


_TWO = ("transformer", "transformer_2")
ONE_EXPERT = WanInVllmOmni("transformer")
TWO_EXPERTS = WanInVllmOmni(_TWO)
ONE_EXPERT_FROM_FRAME = WanFirstFrameInVllmOmni("transformer")
TWO_EXPERTS_FROM_FRAME = WanFirstFrameInVllmOmni(_TWO)


def __getattr__(name: str) -> Any:
    """`FirstFramePipeline`, a subclass of vLLM-Omni's, defined in its environment."""
    if name != "FirstFramePipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _first_frame_pipeline()


@functools.cache
def _first_frame_pipeline() -> type:
    stock: Any = import_module("vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2_i2v")

    class FirstFramePipeline(stock.Wan22I2VPipeline):
        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            """vLLM-Omni takes components of a checkpoint that are listed as absent, [null, null], for present."""
            read = stock._load_json

            def listed(*args: Any, **kwargs: Any) -> dict[str, Any]:
                return {name: part for name, part in read(*args, **kwargs).items() if part != [None, None]}

            stock._load_json = listed
            try:
                super().__init__(od_config=od_config, prefix=prefix)
            finally:
                stock._load_json = read
            embedder = self.transformer.condition_embedder.image_embedder
            if embedder is not None:
                embedder.norm1.eps = embedder.norm2.eps = _EPS

    return FirstFramePipeline
