# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
"""HunyuanVideo 1.5 in vLLM-Omni, image to video: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model besides
`HunyuanVideo15InVllmOmni`.

The frame is cropped by the code that training runs: vLLM-Omni would stretch it, and scale it for the image encoder with
torchvision.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from unirl.models.hunyuan_video15.bridges.vllm_omni import HunyuanVideo15InVllmOmni, adaptable
from unirl.models.hunyuan_video15.frame import HunyuanVideo15Frame

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["BRIDGE", "HunyuanVideo15ImageInVllmOmni"]


class HunyuanVideo15ImageInVllmOmni(HunyuanVideo15Frame, HunyuanVideo15InVllmOmni):
    pipeline = f"{__name__}:Pipeline"
    architecture = "HunyuanVideo15ImageToVideoPipeline"

    def settings(self, model: Any) -> Mapping[str, Any]:
        return {}

    def encode_with_media(
        self, pipeline: Any, prompt: str, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Tensor]:
        image = self.cropped_frame(media, sampling, prompt=repr(prompt))
        with torch.no_grad():
            return {
                **self.encode(pipeline, prompt, sampling),
                "image_embeds": pipeline._get_image_embeds(image, pipeline.device),
                "first_frame": pipeline._get_image_latents(image, sampling.height, sampling.width, pipeline.device),
            }


BRIDGE = HunyuanVideo15ImageInVllmOmni()


def __getattr__(name: str) -> Any:
    """`Pipeline`, made in vLLM-Omni's environment."""
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline()


@functools.cache
def _pipeline() -> type:
    from transformers import SiglipImageProcessorPil
    from vllm_omni.diffusion.models.hunyuan_video.pipeline_hunyuan_video_1_5_i2v import HunyuanVideo15I2VPipeline

    class Pipeline(adaptable(HunyuanVideo15I2VPipeline)):
        """Scales images for the encoder with Pillow, as in training."""

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            super().__init__(od_config=od_config, prefix=prefix)
            folder = f"{od_config.model}/feature_extractor"
            self.feature_extractor = SiglipImageProcessorPil.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )

    return Pipeline
