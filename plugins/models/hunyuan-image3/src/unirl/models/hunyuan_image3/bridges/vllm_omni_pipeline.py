# vLLM and vLLM-Omni are in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false
"""The pipeline of the bridge: vLLM-Omni's transformer of HunyuanImage-3.0, and the half of the model that does not
train.

Runs in the engine's environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from unirl.model_host.lazy_weights import CheckpointValues, empty_parameters, weight_files
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.engine_bridge import check_engine, encoder_in_engine
from vllm.config.vllm import get_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer as stock

from ..checkpoint import CONFIG, WEIGHTS, Sizes, sizes_of
from ..encoder import Encoder
from ..module import HunyuanImage, expert_pieces
from .fused_layers import FUSED

__all__ = ["HunyuanPipeline"]

_FROZEN = ("vae", "vit", "vit_processor", "vit_aligner")
"""Sections of config.json that vLLM-Omni's transformer does not read."""


class HunyuanPipeline(nn.Module):
    """Mixed with `unirl.engines.vllm_omni.pipeline.RolloutPipeline`, which sets the first two attributes."""

    unirl_settings: Mapping[str, Any]
    unirl_folder: str

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        """Raises RuntimeError for a release and for ranks that the bridge does not support."""
        super().__init__()
        ranks = od_config.parallel_config.tensor_parallel_size
        check_engine("HunyuanImage-3.0", engine="vLLM-Omni", release=version("vllm-omni"), least=(0, 32), ranks=ranks)
        self.od_config, self.device, self.vllm_config = od_config, get_local_device(), get_current_vllm_config()
        if not current_platform.is_cpu():
            # Other kernels of experts rearrange the weights, which are then neither written nor compared by name.
            self.vllm_config.kernel_config.moe_backend = "triton"
        folder = Path(self.unirl_folder)
        self.unirl_sizes = sizes = sizes_of(folder)
        files = weight_files(folder, WEIGHTS)
        self.unirl_encoder = encoder_in_engine(
            partial(Encoder, sizes=sizes), folder, files, settings=self.unirl_settings, device=self.device
        )
        settings = read_json(folder / CONFIG)
        self.transformer = _transformer(settings, sizes)
        with empty_parameters(od_config.dtype):
            self._values = CheckpointValues(HunyuanImage(sizes), files, pieces=expert_pieces)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the checkpoint's files; vLLM-Omni knows of none. Returns the names of the parameters loaded."""
        held = dict(self.transformer.named_parameters())
        self._values.fill({_published(name): parameter.data for name, parameter in held.items()})
        return {f"transformer.{name}" for name in held}


def _published(name: str) -> str:
    for end, (own,) in FUSED.items():
        name = f"{name}.".replace(f".{end}.", f".{own}.").removesuffix(".")
    return name


def _transformer(settings: Mapping[str, Any], sizes: Sizes) -> nn.Module:
    """vLLM-Omni's modules in the names of the checkpoint, except for `FUSED`."""
    given = {name: value for name, value in settings.items() if name not in _FROZEN}
    width, ends = sizes.width, {"patch_size": 1, "emb_channels": sizes.width, "hidden_channels": sizes.patch}
    result = nn.Module()
    result.model = model = stock.HunyuanImage3Model(stock.HunyuanImage3Config(**given))
    # vLLM's has more rows than the checkpoint.
    model.wte, model.ln_f = nn.Embedding(sizes.vocab, width), model.norm
    del model.embed_tokens, model.norm
    result.lm_head = nn.Linear(width, sizes.vocab, bias=False)
    for name in ("timestep_emb", "time_embed", "time_embed_2"):
        setattr(result, name, stock.TimestepEmbedder(width))
    result.patch_embed = stock.UNetDown(in_channels=sizes.latent, out_channels=width, **ends)
    result.final_layer = stock.UNetUp(in_channels=width, out_channels=sizes.latent, out_norm=True, **ends)
    result.vision_aligner = stock.LightProjector(settings["vit_aligner"])
    for number, layer in enumerate(model.layers):
        _rearrange(layer, sizes, number)
    return result.eval()


def _rearrange(layer: Any, sizes: Sizes, number: int) -> None:
    attention, mlp, name = layer.self_attn, layer.mlp, f"layers.{number}"
    groups = sizes.heads // sizes.kv_heads + 2
    rows = torch.arange(sizes.kv_heads * groups * sizes.head).view(sizes.kv_heads, groups, sizes.head)
    order = torch.cat([part.flatten() for part in rows.split([groups - 2, 1, 1], dim=1)])
    attention.qkv_proj = _Rearranged(sizes.width, order, prefix=f"{name}.self_attn.qkv_proj")
    order = torch.arange(2 * sizes.shared[number]).view(2, -1).flip(0).flatten()
    mlp.shared_mlp.gate_up_proj = _Rearranged(sizes.width, order, prefix=f"{name}.mlp.shared_mlp.gate_up_proj")
    mlp.gate = _Router(sizes)
    attention.image_rope2d_emb = _Rotation(attention.image_rope2d_emb)
    inner = attention.image_attn.attn
    if inner.attn_backend.get_name() != "SDPA":
        # FlashAttention takes no mask of rows of different lengths.
        inner.attention, inner.attn_backend = inner.sdpa_fallback, SDPABackend


class _Rearranged(nn.Module):
    """A layer whose rows are in the order of the checkpoint, as adapters and synced weights have them, and whose
    outputs are in that of vLLM-Omni: queries, keys and values are not grouped by key, and the gate comes first."""

    def __init__(self, width: int, order: Tensor, *, prefix: str) -> None:
        super().__init__()
        self.rows = ColumnParallelLinear(width, len(order), bias=False, prefix=f"{prefix}.rows")
        self.register_buffer("order", order.to(get_local_device()), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.rows(x)[0][..., self.order], None


class _Router(nn.Module):
    """In fp32, as in training; vLLM-Omni's has the dtype of its weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wg = nn.Linear(sizes.width, sizes.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x.float(), self.wg.weight.float()), None


class _Rotation:
    """vLLM-Omni's rotation of queries and keys, of all rows one after the other: of a batch it would turn every row as
    the first one. They keep their dtype; vLLM-Omni casts them to bf16 whatever the dtype of the weights."""

    def __init__(self, stock: Any) -> None:
        self._rope, self._head = stock.rope, stock.head_dim

    def __call__(self, q: Tensor, k: Tensor, states: Tensor, turns: tuple[Tensor, Tensor], **_: Any) -> Any:
        def turned(x: Tensor) -> Tensor:
            heads = x.float().reshape(1, -1, x.shape[-1] // self._head, self._head)
            return self._rope(heads, *turns).reshape(-1, x.shape[-1]).to(states.dtype)

        return turned(q), turned(k)
