# vLLM-Omni is in the engine's environment alone, where type checking does not look.
"""BAGEL's images and texts in vLLM-Omni, see `unirl.engines.vllm_omni.bridge`: `Bridge`, `SequenceBridge` and
`TextBridge`.

vLLM-Omni's transformer computes every velocity and every logit, behind the keys and values of what comes before the
image or the text, which are computed once for a batch. Tokens, source images and pixels are those of `..encoder`:
vLLM-Omni's VAE has the published size alone and draws a sample of a source's posterior, and its ViT leaves out the last
norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..vision import grid_places
from .fused_layers import FUSED
from .prefix import CONDITIONS, filled, naive_cache, precision
from .vllm_omni_texts import BagelDecoder

if TYPE_CHECKING:
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "BagelInVllmOmni"]


class BagelInVllmOmni:
    pipeline = f"{__name__}:BagelPipeline"
    architecture = "BagelPipeline"
    module = "bagel"
    fused = FUSED

    def unfit(self, model: Any) -> str:
        return ""

    def checkpoint(self, model: Any, path: str) -> Path:
        from ..checkpoint import find

        return find(path) if path else model.folder

    def settings(self, model: Any) -> dict[str, Any]:
        dtypes = {
            "vision_dtype": model.images.vision.vit_model.vision_model.post_layernorm.weight.dtype,
            "vae_dtype": model.images.vae.dtype,
        }
        return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return pipeline.unirl_encoder.latent_shape(sampling)

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        return pipeline.unirl_encoder.encode(inputs, sampling)

    @torch.no_grad()
    def prefilled(self, pipeline: Any, conditions: Mapping[str, Any]) -> dict[str, Ragged]:
        """`keys` and `values` n times [layers, P, kv heads, head], and `position` [n], that of the image."""
        rows = [
            filled(pipeline, dict(zip(CONDITIONS, row, strict=True)))
            for row in zip(*(conditions[name] for name in CONDITIONS), strict=True)
        ]
        return {
            "keys": tuple(row.keys for row in rows),
            "values": tuple(row.values for row in rows),
            "position": torch.tensor([row.position for row in rows], device=pipeline.device),
        }

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        rows, _, height, width = x.shape
        count, marks, device = height * width, pipeline.unirl_encoder.marks, x.device
        # Of each row: the mark before an image, its latents, the mark after it.
        starts = torch.arange(rows, device=device)[:, None] * (count + 2)
        places = grid_places(height, width, side=pipeline.unirl_sizes.latent_side).to(device)
        with precision(pipeline):
            output = pipeline.bagel.forward_single_branch(
                x_t=x.flatten(2).transpose(1, 2).flatten(0, 1),
                timestep=sigma.float().repeat_interleave(count),
                packed_vae_token_indexes=(starts + 1 + torch.arange(count, device=device)).flatten(),
                packed_vae_position_ids=places.repeat(rows),
                packed_text_ids=torch.tensor([marks.image_start, marks.image_end], device=device).repeat(rows),
                packed_text_indexes=(starts + torch.tensor([0, count + 1], device=device)).flatten(),
                packed_position_ids=conditions["position"].to(device).repeat_interleave(count + 2),
                packed_seqlens=torch.full((rows,), count + 2, device=device),
                past_key_values=_joined(conditions["keys"], conditions["values"]),
            )
        return output.float().view(rows, count, -1).transpose(1, 2).reshape(x.shape).contiguous()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        return pipeline.unirl_encoder.decode(latents)

    def decoder(self, pipeline: Any) -> BagelDecoder:
        return BagelDecoder(pipeline)

    def max_model_len(self, pipeline: Any) -> int:
        return pipeline.unirl_encoder.longest


BRIDGE = BagelInVllmOmni()


def __getattr__(name: str) -> Any:
    """`BagelPipeline`, which imports vLLM-Omni."""
    if name != "BagelPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_omni_pipeline import BagelPipeline

    return BagelPipeline


def _joined(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """vLLM-Omni's cache of rows one after the other, each of its own length."""
    lengths = [row.shape[1] for row in keys]
    result = naive_cache(keys[0].shape[0])
    result.key_values_lens = lengths
    if any(lengths):
        for layer in range(keys[0].shape[0]):
            result.key_cache[layer] = torch.cat([row[layer] for row in keys])
            result.value_cache[layer] = torch.cat([row[layer] for row in values])
    return result
