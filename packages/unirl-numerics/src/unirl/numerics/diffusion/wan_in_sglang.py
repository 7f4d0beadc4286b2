# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false
"""Wan in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer, encoder and VAE are its own; the transformer names many layers otherwise. Its UniPC takes no part:
its Euler scheduler, which rollouts need, is in its place, with the sigmas of the request. It reads the boundary of two
experts from the checkpoint, as the model does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .wan_prompts import cleaned

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["ONE_EXPERT", "TWO_EXPERTS", "WanInSglang", "clean", "made_there", "masked", "with_euler_steps"]

_EMBEDDER = "condition_embedder"


@dataclass(frozen=True)
class WanInSglang:
    modules: tuple[str, ...] = ("transformer",)
    pipeline = f"{__name__}:Pipeline"
    pipeline_config = f"{__name__}:PipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.wan:WanT2V_1_3B_SamplingParams"
    architecture = "WanPipeline"
    fused = {}  # noqa: RUF012 - a constant, and no field
    renamed = {  # noqa: RUF012 - a constant, and no field
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
        # Of transformers that read features of images.
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


ONE_EXPERT = WanInSglang()
TWO_EXPERTS = WanInSglang(("transformer", "transformer_2"))


def clean(prompt: str) -> str:
    return " ".join(cleaned(prompt, engine="SGLang").split())


def masked(outputs: Any, inputs: Any) -> Tensor:
    """States [B, L, D] of the encoder, zeros after the last token; SGLang would pad them to 512 tokens."""
    states: Tensor = outputs.last_hidden_state
    return torch.where(outputs.attention_mask[..., None].bool(), states, torch.zeros_like(states))


def with_euler_steps(pipeline: Any, server_args: Any) -> None:
    """`initialize_pipeline` of SGLang's pipelines of Wan, which would take UniPC."""
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    pipeline.modules["scheduler"] = FlowMatchEulerDiscreteScheduler()


def made_there(module: str, make: Callable[[], Sequence[type]]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose `Pipeline` and `PipelineConfig` are made in SGLang's environment."""

    @functools.cache
    def classes() -> Mapping[str, type]:
        result = {kind.__name__: kind for kind in make()}
        for name, kind in result.items():
            # Named as it is found, for SGLang's processes pass it to each other.
            kind.__qualname__ = name
        return result

    def get(name: str) -> Any:
        if name not in ("Pipeline", "PipelineConfig"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return classes()[name]

    return get


def _classes() -> Sequence[type]:
    from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
    from sglang.multimodal_gen.runtime.pipelines.wan_pipeline import WanPipeline

    @dataclass
    class PipelineConfig(WanT2V480PConfig):
        preprocess_text_funcs: Any = (clean,)
        postprocess_text_funcs: Any = (masked,)
        # Otherwise in bfloat16; None is that of `vae_precision`.
        vae_decode_precision: str | None = None

    class Pipeline(WanPipeline):
        initialize_pipeline = with_euler_steps

    return Pipeline, PipelineConfig


__getattr__ = made_there(__name__, _classes)
