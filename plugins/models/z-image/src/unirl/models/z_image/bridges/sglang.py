# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
"""Z-Image in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer, encoder and VAE are its own. The transformer has diffusers' names of weights, except for the
projections of attention and two of the feed-forward, which are one layer each. Its latents have a dim for frames.
SGLang makes as many layers and heads as the published checkpoints have, for it reads their numbers under other names
than diffusers writes; here as many as the checkpoint says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "ZImageInSglang"]


class ZImageInSglang:
    pipeline = "sglang.multimodal_gen.runtime.pipelines.zimage_pipeline:ZImagePipeline"
    pipeline_config = f"{__name__}:PipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.zimage:ZImageSamplingParams"
    architecture = "ZImagePipeline"
    modules: tuple[str, ...] = ("transformer",)
    fused: Mapping[str, tuple[str, ...]] = {"to_qkv": ("to_q", "to_k", "to_v"), "w13": ("w1", "w3")}
    renamed: Mapping[str, str] = {}
    constants = ()
    num_encoders = 1
    rounds_timesteps = False

    def unfit(self, model: Any) -> str:
        return ""

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return (sampling.max_sequence_length,)

    def latent_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        channels, _, height, width = shape
        return channels, height, width

    def packed(self, latents: Tensor) -> Tensor:
        return latents.unsqueeze(2)

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        return packed.reshape(-1, *shape)

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        # Rows of one prompt share their states, which SGLang pads by repeating the last.
        states, length = arguments["encoder_hidden_states"][0], int(arguments["caption_valid_lens"][0])
        missing = sampling.max_sequence_length - length
        mask = torch.ones((1, length), dtype=torch.bool)
        return {
            "prompt_embeds": F.pad(states[:length], (0, 0, 0, missing))[None],
            "prompt_mask": F.pad(mask, (0, missing)),
        }


BRIDGE = ZImageInSglang()


def __getattr__(name: str) -> Any:
    """`PipelineConfig` and `ArchConfig`, made in SGLang's environment."""
    if name not in ("ArchConfig", "PipelineConfig"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _configs()[name]


@functools.cache
def _configs() -> Mapping[str, type]:
    from sglang.multimodal_gen.configs.models.dits.zimage import ZImageArchConfig, ZImageDitConfig
    from sglang.multimodal_gen.configs.pipeline_configs.zimage import ZImagePipelineConfig

    class ArchConfig(ZImageArchConfig):
        def __post_init__(self) -> None:
            # SGLang calls it again once it has read the checkpoint's config; keys that it has no field for are here.
            own = self.extra_attrs
            self.num_layers = own.get("n_layers", self.num_layers)
            self.num_attention_heads = own.get("n_heads", self.num_attention_heads)
            super().__post_init__()

    @dataclass
    class PipelineConfig(ZImagePipelineConfig):
        """With the text of a prompt for each of its outputs, where SGLang has it once and then fails."""

        dit_config: Any = field(default_factory=lambda: ZImageDitConfig(arch_config=ArchConfig()))

        def _split_text_embeds_for_dit(self, batch: Any, *, negative: bool = False) -> Any:
            return super()._split_text_embeds_for_dit(batch, negative=negative) * batch.num_outputs_per_prompt

        def prepare_pos_cond_kwargs(self, batch: Any, *others: Any, **named: Any) -> dict[str, Any]:
            return repeated(super().prepare_pos_cond_kwargs(batch, *others, **named), batch)

        def prepare_neg_cond_kwargs(self, batch: Any, *others: Any, **named: Any) -> dict[str, Any]:
            return repeated(super().prepare_neg_cond_kwargs(batch, *others, **named), batch)

    def repeated(arguments: dict[str, Any], batch: Any) -> dict[str, Any]:
        lengths = arguments["caption_valid_lens"]
        return {**arguments, "caption_valid_lens": lengths.expand(batch.num_outputs_per_prompt)}

    result: dict[str, type] = {"ArchConfig": ArchConfig, "PipelineConfig": PipelineConfig}
    for name, kind in result.items():
        # Named as it is found, for SGLang's processes pass it to each other.
        kind.__qualname__ = name
    return result
