# SGLang is in the engine's environment alone, where type checking does not look; diffusers and transformers export
# their classes lazily.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
"""Wan in SGLang, see `unirl.engines.sglang.bridge.Bridge`.

SGLang's transformer, encoders and VAE are its own; the transformer names many layers otherwise. Its UniPC takes no
part: its Euler scheduler, which rollouts need, is in its place, with the sigmas of the request. It reads the boundary
of two experts from the checkpoint, as the model does. A first frame is scaled and encoded by the code that training
runs, with SGLang's VAE and image encoder: SGLang would scale it, and the size of the video with it, in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
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
    "WanFirstFrameInSglang",
    "WanInSglang",
]

_EMBEDDER = "condition_embedder"
_FEATURES = 257
"""Number of tokens before the text that SGLang's attention takes for features of the image, as the published encoders
have them; diffusers' takes all but the last 512."""
_TWO = ("transformer", "transformer_2")


@dataclass(frozen=True)
class WanInSglang:
    modules: tuple[str, ...] = ("transformer",)
    pipeline: ClassVar[str] = f"{__name__}:Pipeline"
    pipeline_config: ClassVar[str] = f"{__name__}:PipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.wan:WanT2V_1_3B_SamplingParams"
    architecture: ClassVar[str] = "WanPipeline"
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {
        r"patch_embedding\.proj": "patch_embedding",
        rf"{_EMBEDDER}\.text_embedder\.fc_in": f"{_EMBEDDER}.text_embedder.linear_1",
        rf"{_EMBEDDER}\.text_embedder\.fc_out": f"{_EMBEDDER}.text_embedder.linear_2",
        rf"{_EMBEDDER}\.time_embedder\.mlp\.fc_in": f"{_EMBEDDER}.time_embedder.linear_1",
        rf"{_EMBEDDER}\.time_embedder\.mlp\.fc_out": f"{_EMBEDDER}.time_embedder.linear_2",
        rf"{_EMBEDDER}\.time_modulation\.linear": f"{_EMBEDDER}.time_proj",
        r"(blocks\.\d+)\.(to_[qkv]|norm_[qk])": r"\1.attn1.\2",
        r"(blocks\.\d+)\.to_out": r"\1.attn1.to_out.0",
        r"(blocks\.\d+\.attn2)\.to_out": r"\1.to_out.0",
        r"(blocks\.\d+\.ffn)\.fc_in": r"\1.net.0.proj",
        r"(blocks\.\d+\.ffn)\.fc_out": r"\1.net.2",
        r"(blocks\.\d+)\.self_attn_residual_norm\.norm": r"\1.norm2",
        # In transformers that read features of images.
        rf"{_EMBEDDER}\.image_embedder\.ff\.fc_in": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
        rf"{_EMBEDDER}\.image_embedder\.ff\.fc_out": f"{_EMBEDDER}.image_embedder.ff.net.2",
    }
    constants = ()
    num_encoders = 1
    rounds_timesteps = False

    def unfit(self, model: Any) -> str:
        if len(self.modules) == 1:
            return ""
        timestep = 1000.0 * model.boundary
        return (
            ""
            if timestep == int(timestep)
            else (
                f"SGLang rounds timesteps down where it chooses the expert, and those of this checkpoint change at "
                f"{timestep:g}. Use engine=trainside or engine=vllm-omni."
            )
        )

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return (sampling.max_sequence_length,)

    def latent_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return shape

    def packed(self, latents: Tensor) -> Tensor:
        return latents

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        return packed

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        return {"prompt_embeds": arguments["encoder_hidden_states"]}


class WanFirstFrameInSglang(WanSource, WanInSglang):
    pipeline = f"{__name__}:FirstFramePipeline"
    pipeline_config = f"{__name__}:FirstFramePipelineConfig"
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


ONE_EXPERT = WanInSglang()
TWO_EXPERTS = WanInSglang(_TWO)
ONE_EXPERT_FROM_FRAME = WanFirstFrameInSglang()
TWO_EXPERTS_FROM_FRAME = WanFirstFrameInSglang(_TWO)


def _features(pipeline: Any, frame: Any, *, device: Any) -> Tensor:
    """Features of a PIL image, [1, S, D]."""
    from diffusers import WanImageToVideoPipeline
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
    from transformers import CLIPImageProcessorPil

    parts: Any = SimpleNamespace(
        image_encoder=pipeline.get_module("image_encoder"),
        # Scaled with Pillow, as in training.
        image_processor=CLIPImageProcessorPil.from_pretrained(
            f"{pipeline.model_path}/image_processor", local_files_only=True, trust_remote_code=False
        ),
    )
    with set_forward_context(current_timestep=0, attn_metadata=None):
        return WanImageToVideoPipeline.encode_image(parts, frame, device=device)


def _clean(prompt: str) -> str:
    return " ".join(cleaned(prompt, engine="SGLang").split())


def _masked(outputs: Any, inputs: Any) -> Tensor:
    """States [B, L, D] of the encoder, zeros after the last token; SGLang would pad them to 512 tokens."""
    states: Tensor = outputs.last_hidden_state
    return torch.where(outputs.attention_mask[..., None].bool(), states, torch.zeros_like(states))


def _with_euler_steps(pipeline: Any, server_args: Any) -> None:
    """`initialize_pipeline` of SGLang's pipelines of Wan, which would take UniPC."""
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    pipeline.modules["scheduler"] = FlowMatchEulerDiscreteScheduler()


def __getattr__(name: str) -> Any:
    """The subclasses of SGLang's classes, defined in its environment."""
    if name not in ("Pipeline", "PipelineConfig", "FirstFramePipeline", "FirstFramePipelineConfig"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classes()[name]


@functools.cache
def _classes() -> Mapping[str, type]:
    from sglang.multimodal_gen.configs.models.encoders import CLIPVisionConfig
    from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
    from sglang.multimodal_gen.runtime.pipelines.wan_i2v_pipeline import WanImageToVideoPipeline
    from sglang.multimodal_gen.runtime.pipelines.wan_pipeline import WanPipeline

    @dataclass
    class PipelineConfig(WanT2V480PConfig):
        preprocess_text_funcs: Any = (_clean,)
        postprocess_text_funcs: Any = (_masked,)
        # Otherwise in bfloat16; None is that of `vae_precision`.
        vae_decode_precision: str | None = None

    # Not SGLang's configuration for this pipeline, whose task requires a file of an image.
    @dataclass
    class FirstFramePipelineConfig(PipelineConfig):
        image_encoder_config: Any = field(default_factory=CLIPVisionConfig)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.vae_config.load_encoder = True

    class Pipeline(WanPipeline):
        initialize_pipeline = _with_euler_steps

    class FirstFramePipeline(WanImageToVideoPipeline):
        initialize_pipeline = _with_euler_steps

    result = {cls.__name__: cls for cls in (Pipeline, PipelineConfig, FirstFramePipeline, FirstFramePipelineConfig)}
    for name, cls in result.items():
        # SGLang's processes pass it to each other by this name.
        cls.__qualname__ = name
    return result
