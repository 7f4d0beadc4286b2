# vLLM and vLLM-Omni are in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false
"""HunyuanImage-3.0's images in vLLM-Omni, see `unirl.engines.vllm_omni.bridge.Bridge` and `SequenceBridge`.

vLLM-Omni's transformer computes every velocity, behind the keys and values of what comes before the image, which are
computed once for a batch. Tokens, source images and pixels are those of `..encoder`: vLLM-Omni draws a sample of a
source's posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.layers import sight

from ..module import TIMESTEPS, angles
from ..sequence import layout, moves
from .fused_layers import FUSED

if TYPE_CHECKING:
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "HunyuanInVllmOmni"]

_CONDITIONS = ("tokens", "latents", "latent_sizes", "features", "feature_sizes")


class HunyuanInVllmOmni:
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

    def checkpoint(self, model: Any, path: str) -> Path:
        from ..checkpoint import find, sizes_of

        if not path:
            return model.folder
        folder = find(path)
        # Refuses another layout.
        sizes_of(folder)
        return folder

    def settings(self, model: Any) -> dict[str, Any]:
        parts = {"vision_dtype": model.images.vision, "vae_dtype": model.images.vae}
        return {key: str(next(part.parameters()).dtype).removeprefix("torch.") for key, part in parts.items()}

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return pipeline.unirl_encoder.latent_shape(sampling)

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        return pipeline.unirl_encoder.encode(inputs, sampling)

    @torch.no_grad()
    def prefilled(self, pipeline: Any, conditions: Mapping[str, Any]) -> dict[str, Ragged]:
        """`keys` and `values` n times [layers, P, kv heads, head]."""
        rows = [
            _before_image(pipeline, dict(zip(_CONDITIONS, row, strict=True)))
            for row in zip(*(conditions[name] for name in _CONDITIONS), strict=True)
        ]
        return {"keys": tuple(keys for keys, _ in rows), "values": tuple(values for _, values in rows)}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        transformer, device = pipeline.transformer, x.device
        height, width = x.shape[2:]
        count, times = height * width, TIMESTEPS * sigma.float()
        noisy, *grid = transformer.patch_embed(x.to(_dtype(transformer)), transformer.time_embed(times))
        states = torch.cat([transformer.timestep_emb(times)[:, None], noisy], dim=1)
        lengths = torch.tensor([row.shape[1] for row in conditions["keys"]], device=device)
        longest = int(lengths.max())
        moved = torch.cat([torch.zeros(1, 2, dtype=torch.int64), moves(height, width, count)]).to(device)
        numbers = torch.arange(count + 1, device=device)
        # The padding behind shorter sequences is not seen, nor is the image by the timestep before it.
        mask = torch.ones(len(x), 1, count + 1, longest + count + 1, dtype=torch.bool, device=device)
        mask[:, 0, :, :longest] = (torch.arange(longest, device=device) < lengths[:, None])[:, None]
        mask[:, :, 0, longest + 1 :] = False
        caches = [layer.self_attn.image_attn for layer in transformer.model.layers]
        for number, cache in enumerate(caches):
            kept = ([row[number] for row in conditions[name]] for name in ("keys", "values"))
            cache.image_kv_cache_map = tuple(torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in kept)
            cache.image_kv_cache_lens = lengths
        output = _decoded(
            pipeline, states, mask=mask, places=lengths[:, None, None] + numbers[:, None] + moved, behind=longest
        )
        for cache in caches:
            cache.clear_legacy_prompt_kv_cache()
        return transformer.final_layer(output[:, 1:], transformer.time_embed_2(times), *grid).float()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        return pipeline.unirl_encoder.decode(latents)


BRIDGE = HunyuanInVllmOmni()


def __getattr__(name: str) -> Any:
    """`HunyuanPipeline`, which imports vLLM-Omni."""
    if name != "HunyuanPipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_omni_pipeline import HunyuanPipeline

    return HunyuanPipeline


def _before_image(pipeline: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence. row: its conditions."""
    transformer, encoder = pipeline.transformer, pipeline.unirl_encoder
    dtype, stand, tokens = _dtype(transformer), encoder.stand, row["tokens"].to(pipeline.device)
    keep = torch.ones_like(tokens, dtype=torch.bool)[None]
    positions, blocks = layout(tokens[None], keep, marks=encoder.marks, stand=stand)
    states = transformer.model.wte(tokens.masked_fill(tokens >= stand.vocab, 0))
    places = positions[0, :, None].repeat(1, 2)
    latents, (moved,) = encoder.sources({name: (value,) for name, value in row.items()})
    if latents:
        zero = torch.zeros(1, device=tokens.device)
        sources = [transformer.patch_embed(one[None].to(dtype), transformer.time_embed(zero))[0][0] for one in latents]
        states[tokens == stand.latent] = torch.cat(sources)
        states[tokens == stand.feature] = transformer.vision_aligner(row["features"].to(dtype))
        states[tokens == stand.clean_time] = transformer.timestep_emb(zero)
        places[(tokens == stand.latent) | (tokens == stand.feature)] += torch.cat(moved).to(tokens.device)
    _decoded(pipeline, states[None], mask=sight(keep, blocks)[:, None], places=places[None])
    caches = [layer.self_attn.image_attn for layer in transformer.model.layers]
    keys, values = zip(*(cache.image_kv_cache_map for cache in caches), strict=True)
    for cache in caches:
        cache.clear_legacy_prompt_kv_cache()
    return torch.cat(keys), torch.cat(values)


def _decoded(pipeline: Any, states: Tensor, *, mask: Tensor, places: Tensor, behind: int | None = None) -> Tensor:
    """States [B, L, D] after the last layer, without the last norm. mask: [B, 1, L, cached + L].  places: rows and
    columns [B, L, 2].  behind: positions of the cache; None fills it with all that is given."""
    from vllm.forward_context import set_forward_context

    sizes, (rows, count) = pipeline.unirl_sizes, states.shape[:2]
    angle = angles(places, head=sizes.head, theta=sizes.rope_theta).flatten(0, 1)
    # Experts are looked up in the config that they were made with.
    with set_forward_context(None, pipeline.vllm_config):
        return pipeline.transformer.model(
            inputs_embeds=states,
            attention_mask=mask,
            custom_pos_emb=(angle.cos(), angle.sin()),
            mode="gen_image",
            first_step=behind is None,
            query_lens=[count] * rows,
            seq_lens=[mask.shape[3]] * rows,
            num_image_tokens=count,
            gen_timestep_scatter_index=torch.full((rows, 1), count, device=states.device) if behind is None else None,
            use_cache=False,
            return_dict=True,
        ).last_hidden_state


def _dtype(transformer: Any) -> torch.dtype:
    return transformer.model.wte.weight.dtype
