# vLLM and vLLM-Omni are in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false
"""HunyuanImage-3.0's images and texts in vLLM-Omni, see `unirl.engines.vllm_omni.bridge`: `Bridge`, `SequenceBridge`
and `TextBridge`.

vLLM-Omni's transformer computes every velocity and every logit, behind the keys and values of what comes before the
image or the text, which are computed once for a batch. Tokens, source images and pixels are those of `..encoder`:
vLLM-Omni draws a sample of a source's posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.engine_bridge import UnifiedBridge

from ..module import TIMESTEPS
from ..sequence import moves
from .decoder import HunyuanDecoder, caches_of, dtype_of, through_layers
from .fused_layers import FUSED

__all__ = ["BRIDGE", "HunyuanInVllmOmni"]


class HunyuanInVllmOmni(UnifiedBridge):
    pipeline = f"{__name__}:HunyuanPipeline"
    architecture = "HunyuanImage3ForCausalMM"
    module = "transformer"
    fused = FUSED

    def unfit(self, model: Any) -> str:
        from ..checkpoint import CONFIG

        if min(model.sizes.chosen) < 2:
            return (
                "got a checkpoint in which a token takes one expert (moe_topk 1), whose weight vLLM-Omni does not make "
                "1. Use engine=trainside."
            )
        shared = read_json(model.folder / CONFIG).get("intermediate_size")
        if {shared} != set(model.sizes.inner):
            return (
                f"got a checkpoint whose intermediate_size is {shared}, expected its moe_intermediate_size, "
                f"{sorted(set(model.sizes.inner))}: vLLM-Omni sizes the MLP of all tokens by the first. Use "
                "engine=trainside."
            )
        return ""

    def check_layout(self, path: str) -> Path:
        from ..checkpoint import find, sizes_of

        folder = find(path)
        sizes_of(folder)
        return folder

    def decoder(self, pipeline: Any) -> HunyuanDecoder:
        return HunyuanDecoder(pipeline)

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        transformer, device = pipeline.transformer, x.device
        height, width = x.shape[2:]
        count, times = height * width, TIMESTEPS * sigma.float()
        noisy, *grid = transformer.patch_embed(x.to(dtype_of(transformer)), transformer.time_embed(times))
        states = torch.cat([transformer.timestep_emb(times)[:, None], noisy], dim=1)
        lengths = torch.tensor([row.shape[1] for row in conditions["keys"]], device=device)
        longest = int(lengths.max())
        moved = torch.cat([torch.zeros(1, 2, dtype=torch.int64), moves(height, width, count)]).to(device)
        numbers = torch.arange(count + 1, device=device)
        # The padding behind shorter sequences is not seen, nor is the image by the timestep before it.
        mask = torch.ones(len(x), 1, count + 1, longest + count + 1, dtype=torch.bool, device=device)
        mask[:, 0, :, :longest] = (torch.arange(longest, device=device) < lengths[:, None])[:, None]
        mask[:, :, 0, longest + 1 :] = False
        caches = caches_of(transformer)
        for number, cache in enumerate(caches):
            kept = ([row[number] for row in conditions[name]] for name in ("keys", "values"))
            cache.image_kv_cache_map = tuple(pad_sequence(each, batch_first=True) for each in kept)
            cache.image_kv_cache_lens = lengths
        output = through_layers(
            pipeline, states, mask=mask, places=lengths[:, None, None] + numbers[:, None] + moved, behind=longest
        )
        for cache in caches:
            cache.clear_legacy_prompt_kv_cache()
        return transformer.final_layer(output[:, 1:], transformer.time_embed_2(times), *grid).float()


BRIDGE = HunyuanInVllmOmni()


def __getattr__(name: str) -> Any:
    """`HunyuanPipeline`, which imports vLLM-Omni."""
    if name != "HunyuanPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_omni_pipeline import HunyuanPipeline

    return HunyuanPipeline
