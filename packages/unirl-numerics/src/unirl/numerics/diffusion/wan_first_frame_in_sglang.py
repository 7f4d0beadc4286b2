# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
"""Wan from a first frame in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model besides `WanInSglang`.

The frame is scaled and encoded by the code that training runs, with SGLang's VAE and image encoder: SGLang would scale
it, and the size of the video with it, in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from unirl.numerics.diffusion import wan_in_sglang
from unirl.numerics.diffusion.wan_in_sglang import WanInSglang, made_there, with_euler_steps
from unirl.numerics.diffusion.wan_source import WanSource

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["ONE_EXPERT", "TWO_EXPERTS", "WanFirstFrameInSglang"]

_FEATURES = 257
"""Number of tokens before the text that SGLang's attention takes for features of the image, as the published encoders
have them; diffusers' takes all but the last 512."""


class WanFirstFrameInSglang(WanSource, WanInSglang):
    pipeline = f"{__name__}:Pipeline"
    pipeline_config = f"{__name__}:PipelineConfig"
    architecture = "WanImageToVideoPipeline"

    def unfit(self, model: Any) -> str:
        if model.transformer.config.image_dim:
            settings = model.pipeline.image_encoder.config
            features = 1 + (settings.image_size // settings.patch_size) ** 2
            if features != _FEATURES:
                return (
                    f"the image encoder of this checkpoint makes {features} features of a frame, but SGLang takes the "
                    f"first {_FEATURES} tokens for these. Use engine=trainside or engine=vllm-omni."
                )
        return super().unfit(model)

    def settings(self, model: Any) -> dict[str, Any]:
        return {}

    def encode_media(
        self, pipeline: Any, batch: Any, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Tensor]:
        frame = self.first_frame(media, sampling, prompt=repr(batch.prompt))
        vae = pipeline.get_module("vae")
        weight = next(vae.parameters())
        parts = SimpleNamespace(
            encode=lambda video: SimpleNamespace(latent_dist=vae.encode(video)), dtype=weight.dtype, config=vae.config
        )
        # SGLang repeats both for the rows of the batch.
        batch.image_latent = self.source(frame, sampling, vae=parts, device=weight.device)
        if pipeline.get_module("image_encoder") is None:
            return {"source": batch.image_latent}
        self.check_length(sampling)
        batch.image_embeds = [_features(pipeline, frame, device=weight.device)]
        return {"source": batch.image_latent, "image_embeds": batch.image_embeds[0]}


def _features(pipeline: Any, frame: Any, *, device: Any) -> Tensor:
    """Those of a PIL image, [1, S, D]."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    # Scaled with Pillow, as in training.
    processor: Any = import_module("transformers").CLIPImageProcessorPil
    parts = SimpleNamespace(
        image_encoder=pipeline.get_module("image_encoder"),
        image_processor=processor.from_pretrained(f"{pipeline.model_path}/image_processor", local_files_only=True),
    )
    encode: Any = import_module("diffusers").WanImageToVideoPipeline.encode_image
    with set_forward_context(current_timestep=0, attn_metadata=None):
        return encode(parts, frame, device=device)


ONE_EXPERT = WanFirstFrameInSglang()
TWO_EXPERTS = WanFirstFrameInSglang(("transformer", "transformer_2"))


def _classes() -> Sequence[type]:
    from sglang.multimodal_gen.configs.models.encoders import CLIPVisionConfig
    from sglang.multimodal_gen.runtime.pipelines.wan_i2v_pipeline import WanImageToVideoPipeline

    # Not SGLang's configuration for this pipeline, whose task requires a file of an image.
    @dataclass
    class PipelineConfig(wan_in_sglang.PipelineConfig):
        image_encoder_config: Any = field(default_factory=CLIPVisionConfig)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.vae_config.load_encoder = True

    class Pipeline(WanImageToVideoPipeline):
        initialize_pipeline = with_euler_steps

    return Pipeline, PipelineConfig


__getattr__ = made_there(__name__, _classes)
