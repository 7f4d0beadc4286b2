# The base of the pipeline is in the environment of the engine alone, where type checking does not look.
# pyright: reportUnknownMemberType=false

"""Wan from a first frame in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model besides
`WanInVllmOmni`.

The frame is scaled and encoded by the code that training runs, with vLLM-Omni's VAE and image encoder: vLLM-Omni would
scale it otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from unirl.numerics.diffusion.wan_in_vllm_omni import WanInVllmOmni
from unirl.numerics.diffusion.wan_source import WanSource

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["ONE_EXPERT", "TWO_EXPERTS", "WanFirstFrameInVllmOmni"]

_EPS = 1e-5
"""Epsilon of the two layer norms around the projection of image features, in diffusers and in the original code.
vLLM-Omni has 1e-6, which moves a miniature's latents by 1e-4."""


class WanFirstFrameInVllmOmni(WanSource, WanInVllmOmni):
    pipeline = f"{__name__}:Pipeline"
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
                self.check_length(sampling)
                # Scaled with Pillow, as in training.
                processor: Any = import_module("transformers").CLIPImageProcessorPil
                folder = f"{pipeline.od_config.model}/image_processor"
                pipeline.image_processor = processor.from_pretrained(folder, local_files_only=True)
                result["image_embeds"] = pipeline.encode_image(frame)
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = super().arguments(x, conditions)
        result["hidden_states"] = torch.cat([x, conditions["source"].to(x)], dim=1)
        if "image_embeds" in conditions:
            result["encoder_hidden_states_image"] = conditions["image_embeds"]
        return result


ONE_EXPERT = WanFirstFrameInVllmOmni("transformer")
TWO_EXPERTS = WanFirstFrameInVllmOmni(("transformer", "transformer_2"))


def __getattr__(name: str) -> Any:
    """`Pipeline`, made in vLLM-Omni's environment."""
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline()


@functools.cache
def _pipeline() -> type:
    stock: Any = import_module("vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2_i2v")

    class Pipeline(stock.Wan22I2VPipeline):
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

    return Pipeline
