# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Qwen-Image-Edit and Qwen-Image-Edit-Plus in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

Sources are encoded as in training, by SGLang's encoder and VAE: its stages scale images to fixed areas. SGLang edits
one image at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from unirl.models.qwen_image.bridges.sglang import QwenImageInSglang
from unirl.models.qwen_image.sources import PICTURE, EditSources, held_processor

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["BRIDGE", "BRIDGE_PLUS", "QwenImageEditInSglang", "QwenImageEditPlusInSglang"]

_PIXELS = 16
"""Side of what is one token, in pixels."""


class QwenImageEditInSglang(EditSources, QwenImageInSglang):
    pipeline = "sglang.multimodal_gen.runtime.pipelines.qwen_image:QwenImageEditPipeline"
    pipeline_config = f"{__name__}:PipelineConfig"
    architecture = "QwenImageEditPipeline"
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    """Part of this pipeline's own template; here it has that of Qwen-Image-Edit-Plus."""

    def unfit(self, model: Any) -> str:
        if model.token_types:
            return ""
        return (
            "got model.token_types=false; SGLang's text encoder always gives tokens of images positions in rows and "
            "columns. Set it to true, or choose engine=trainside or engine=vllm-omni."
        )

    def settings(self, model: Any) -> dict[str, Any]:
        return {**model.source_settings, "max_rows": 1}

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Any]:
        (states,) = arguments["encoder_hidden_states"]
        return {"prompt_embeds": tuple(states)}

    def encode_media(
        self, pipeline: Any, batch: Any, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Ragged]:
        settings = {name: value for name, value in pipeline.unirl_settings.items() if name != "max_rows"}
        components = _components(pipeline)
        texts = [batch.prompt, batch.negative_prompt][: 1 + batch.do_classifier_free_guidance]
        each = [
            self.edit_conditions(components, text, media, name=text, length=sampling.max_sequence_length, **settings)
            for text in texts
        ]
        for prefix, own in zip(("", "negative_"), each, strict=False):
            embeds = own["prompt_embeds"][None]
            setattr(batch, f"{prefix}prompt_embeds", [embeds])
            setattr(batch, f"{prefix}prompt_embeds_mask", [torch.ones(embeds.shape[:2], dtype=torch.bool)])
            setattr(batch, f"{prefix}prompt_seq_lens", [[embeds.shape[1]]])
        source, shapes = each[0]["source"], each[0]["source_shapes"]
        batch.image_latent = source[None]
        batch.vae_image_sizes = [(_PIXELS * columns, _PIXELS * rows) for _, rows, columns in shapes.tolist()]
        return {"source": (source,), "source_shapes": (shapes,)}

    def _states(self, pipeline: Any, **tokens: Tensor) -> Tensor:
        from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

        encoder = pipeline.text_encoder.module
        # SGLang reads off the ids which tokens are of images.
        tokens.pop("mm_token_type_ids")
        tokens["pixel_values"] = tokens["pixel_values"].to(next(encoder.parameters()).dtype)
        with set_forward_context(current_timestep=0, attn_metadata=None):
            return encoder(**tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]


class QwenImageEditPlusInSglang(QwenImageEditInSglang):
    pipeline = "sglang.multimodal_gen.runtime.pipelines.qwen_image:QwenImageEditPlusPipeline"
    architecture = "QwenImageEditPlusPipeline"
    picture = PICTURE
    takes_several = True
    edits = "qwen-image-edit-plus"


def _components(pipeline: Any) -> Any:
    """SGLang's components under the names of diffusers'."""
    from diffusers.image_processor import VaeImageProcessor

    config, vae, encoder = (
        pipeline.server_args.pipeline_config,
        *(pipeline.get_module(name) for name in ("vae", "text_encoder")),
    )
    # SGLang's own may scale with torchvision.
    processor = held_processor(f"{pipeline.model_path}/processor")
    weight = next(vae.parameters())

    def encode_vae_image(pixels: Tensor, generator: None) -> Tensor:
        encoded = vae.encode(pixels)
        scale, shift = config.get_decode_scale_and_shift(pixels.device, pixels.dtype, vae)
        return (getattr(encoded, "latent_dist", encoded).mode() - shift) * scale

    # SGLang's, with a place for the prompt.
    template = config.prepare_image_processor_kwargs(SimpleNamespace(prompt="{}", condition_image=[]))["text"][0]
    return SimpleNamespace(
        processor=processor,
        tokenizer=processor.tokenizer,
        text_encoder=SimpleNamespace(module=encoder, device=weight.device),
        vae=weight,
        image_processor=VaeImageProcessor(vae_scale_factor=_PIXELS),
        prompt_template_encode=template,
        prompt_template_encode_start_idx=64,
        _encode_vae_image=encode_vae_image,
        _pack_latents=lambda latents, *_: F.pixel_unshuffle(latents[:, :, 0], 2).flatten(2).transpose(1, 2),
    )


BRIDGE = QwenImageEditInSglang()
BRIDGE_PLUS = QwenImageEditPlusInSglang()


def __getattr__(name: str) -> Any:
    """`PipelineConfig`, made in SGLang's environment."""
    if name != "PipelineConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline_config()


@functools.cache
def _pipeline_config() -> type:
    from sglang.multimodal_gen.configs.pipeline_configs.base import ModelTaskType
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImageEditPlusPipelineConfig

    # Its positions are those of any number of sources, of any sizes. SGLang is given no file of an image, which it
    # would require for its own task. Named as it is found, for SGLang's processes pass it to each other.
    names = {
        "__module__": __name__,
        "__qualname__": "PipelineConfig",
        "__annotations__": {"task_type": ModelTaskType},
        "task_type": ModelTaskType.TI2I,
    }
    return dataclass(type("PipelineConfig", (QwenImageEditPlusPipelineConfig,), names))
