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
from typing import Any

import torch
from torch import Tensor
from unirl.model_host.unified.engine_bridge import UnifiedBridge

from ..vision import grid_places
from .decoder import BagelDecoder, naive_cache, precision
from .fused_layers import FUSED

__all__ = ["BRIDGE", "BagelInVllmOmni"]


class BagelInVllmOmni(UnifiedBridge):
    pipeline = f"{__name__}:BagelPipeline"
    architecture = "BagelPipeline"
    module = "bagel"
    fused = FUSED

    def check_layout(self, path: str) -> Path:
        from ..checkpoint import find

        return find(path)

    def decoder(self, pipeline: Any) -> BagelDecoder:
        return BagelDecoder(pipeline)

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
