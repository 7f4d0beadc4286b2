"""Config of the sglang engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import Acceleration
from unirl.core.limits import limit
from unirl.engine_host.config import OTHER_LAYOUT, SPLIT, ExternalConfig

__all__ = ["CACHE", "INEXACT", "SglangConfig"]

CACHE = "SGLANG_CACHE_DIT_ENABLED"
"""Environment variable by which SGLang skips blocks whose output has changed little since the last step."""
INEXACT = (CACHE, "SGLANG_DIFFUSION_ENABLE_MXFP8_ATTENTION")
"""Environment variables that change what is computed: `true` or `false`."""
_APPROXIMATE = (
    "aiter_sage",
    "block_sparse_attn",
    "cube_sparse_attn",
    "fp8_fa_sm120",
    "hybrid_window_attn_h3",
    "laser_attn",
    "rain_fusion_attn",
    "sage_attn",
    "sage_attn_3",
    "sage_sla_attn",
    "sla_attn",
    "sliding_tile_attn",
    "sol_attn",
    "sparge_attn",
    "sparse_video_gen_2_attn",
    "subblock_sparse_attn",
    "video_sparse_attn",
    "video_sparse_attn_h3",
    "vmoba_attn",
)
"""Attention that quantizes queries and keys, or leaves some out."""


@dataclass
class SglangConfig(ExternalConfig):
    """Settings of all external engines plus these; `extra` holds arguments of SGLang's `ServerArgs`."""

    max_num_seqs: int = limit(8, least=1)
    """Maximum number of samples of one prompt denoised and decoded together."""
    port: int = limit(0, least=0, most=65_535)
    """TCP port for the rendezvous of SGLang's processes; 0 picks a free one."""

    rounding_only = ("max_num_seqs",)
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        **dict.fromkeys(
            ("extra.attention_backend", "extra.component_attention_backends"),
            Acceleration(scope="rollout", error=dict.fromkeys(_APPROXIMATE, math.inf)),
        ),
        "extra.kv_cache_quant_config": Acceleration(scope="rollout", error=math.inf),
        **{
            f"environment.{name}": Acceleration(scope="rollout", error=math.inf, exact=("false", "0"))
            for name in INEXACT
        },
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "extra.cfg_parallel_size",
                "extra.dp_size",
                "extra.enable_cfg_parallel",
                "extra.nnodes",
                "extra.ring_degree",
                "extra.sp_degree",
                "extra.tp_size",
                "extra.ulysses_degree",
            ),
            SPLIT,
        ),
        **dict.fromkeys(("extra.component_quantizations", "extra.nunchaku_config", "extra.quantization"), OTHER_LAYOUT),
        **dict.fromkeys(
            ("extra.cache_strategy", "extra.enable_cache_dit"),
            f"SGLang's cache of denoiser outputs is engine.environment.{CACHE}=true",
        ),
        **dict.fromkeys(
            (
                "extra.batching_max_size",
                "extra.lora_alpha",
                "extra.lora_nickname",
                "extra.lora_path",
                "extra.lora_scale",
                "extra.lora_target_modules",
                "extra.model_id",
                "extra.model_paths",
                "extra.pipeline_class_name",
            ),
            "this engine sets up rollouts and adapters by it",
        ),
    }
