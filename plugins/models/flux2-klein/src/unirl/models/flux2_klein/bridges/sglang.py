# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
"""FLUX.2 [klein] in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer, encoder and VAE are its own; the transformer has diffusers' names of weights. SGLang pads every
prompt to 512 tokens; here to the number that the request says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from unirl.models.flux2_klein.sources import Sources

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["BRIDGE", "Flux2KleinInSglang"]


class Flux2KleinInSglang(Sources):
    pipeline = "sglang.multimodal_gen.runtime.pipelines.flux_2_klein:Flux2KleinPipeline"
    pipeline_config = f"{__name__}:PipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.flux:Flux2KleinBaseSamplingParams"
    architecture = "Flux2KleinPipeline"
    modules: tuple[str, ...] = ("transformer",)
    fused: Mapping[str, tuple[str, ...]] = {}
    renamed: Mapping[str, str] = {}
    constants = ()
    num_encoders = 1
    rounds_timesteps = True

    def unfit(self, model: Any) -> str:
        return ""

    def settings(self, model: Any) -> dict[str, Any]:
        return {}

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return (sampling.max_sequence_length,)

    def latent_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return shape

    def packed(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        return packed.transpose(1, 2).reshape(-1, *shape).contiguous()

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        return {"prompt_embeds": arguments["encoder_hidden_states"]}

    def encode_media(
        self, pipeline: Any, batch: Any, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Ragged]:
        from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
        from sglang.multimodal_gen.configs.pipeline_configs.flux import _prepare_image_ids

        vae, config = pipeline.get_module("vae"), pipeline.server_args.pipeline_config
        unit = 2 * config.vae_config.arch_config.vae_scale_factor
        weight = next(vae.parameters())
        latents: list[Tensor] = []
        for pixels in self.pixels(media, Flux2ImageProcessor(vae_scale_factor=unit), unit=unit):
            encoded = vae.encode(pixels.to(weight))
            encoded = getattr(encoded, "latent_dist", encoded).mode()
            latents.append(config.normalize_vae_encode(config.postprocess_vae_encode(encoded, vae), vae))
        source, ids = torch.cat([self.packed(one)[0] for one in latents]), _prepare_image_ids(latents)[0]
        batch.image_latent = source[None].repeat(batch.num_outputs_per_prompt, 1, 1)
        batch.condition_image_latent_ids = ids.to(source.device)
        return {"source": (source,), "source_ids": (ids.to(source.device),)}


BRIDGE = Flux2KleinInSglang()


def __getattr__(name: str) -> Any:
    """`PipelineConfig`, made in SGLang's environment."""
    if name != "PipelineConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline_config()


@functools.cache
def _pipeline_config() -> type:
    from sglang.multimodal_gen.configs.pipeline_configs.flux import Flux2KleinBasePipelineConfig

    def tokenize_prompt(self: Any, prompts: Sequence[str], tokenizer: Any, settings: Mapping[str, Any]) -> Any:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            for prompt in prompts
        ]
        length = settings["max_length"]
        return tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")

    # Named as it is found, for SGLang's processes pass it to each other.
    names = {"__module__": __name__, "__qualname__": "PipelineConfig", "tokenize_prompt": tokenize_prompt}
    return type("PipelineConfig", (Flux2KleinBasePipelineConfig,), names)
