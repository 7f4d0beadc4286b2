"""Maps settings of a recipe and of a request to SGLang's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import Model
from unirl.core.types.request import TextRequest
from unirl.engine_host.program import refuse_extra
from unirl.engine_host.text_engine import CPU_CACHE_MB

from .config import SglangConfig

__all__ = ["CPU_VARIABLES", "VARIABLES", "cache_bytes", "engine_arguments", "linear_names", "sampling_arguments"]

VARIABLES = {
    # The margin below exceeds the checkpoint's context length; completions do not.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "1",
}
CPU_VARIABLES = {"SGLANG_PLATFORM": "unirl-cpu"}
"""Names the platform of `unirl.engine_cpu`'s `sglang-platform`."""
MARGIN = 6
"""Tokens of the context length that SGLang reserves, beyond prompt and completion."""


def engine_arguments(
    config: SglangConfig, *, folder: Path, dtype: torch.dtype, on_cpu: bool, lora_targets: Sequence[str]
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`. Raises RecipeError for one in `engine.extra` that has its own key or is
    unsupported.

    lora_targets: names of the layers that may have adapters, such as `q_proj`.
    """
    checkpoint = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # A model that reads images keeps the settings of its language model apart.
    checkpoint = checkpoint.get("text_config", checkpoint)
    longest = config.max_model_len or int(checkpoint["max_position_embeddings"])
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "device": "cpu" if on_cpu else "cuda",
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": longest + MARGIN,
        "max_running_requests": config.max_num_seqs,
        "disable_cuda_graph": config.enforce_eager or on_cpu,
        "disable_radix_cache": not config.prefix_caching,
        "random_seed": config.seed,
        "log_level": config.log_level.lower(),
        # Tokens are sampled with per-sample seeds, see `scheduler`.
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        # Settings in the checkpoint's generation_config.json are not part of the request.
        "sampling_defaults": "openai",
        "skip_server_warmup": True,
        # Otherwise it would keep a core busy between rollouts, which training needs.
        "sleep_on_idle": True,
        # It allocates with CUDA's virtual memory. On a CPU hooks in the scheduler release the memory.
        "enable_memory_saver": config.sleep_mode and not on_cpu,
        "enable_weights_cpu_backup": config.sleep_mode and not on_cpu,
        "enable_deterministic_inference": config.batch_invariant,
    }
    if on_cpu:
        arguments["disable_overlap_schedule"] = True
    elif checkpoint.get("num_experts"):
        # Other kernels of experts reorder the weights, which could then be neither loaded nor compared.
        arguments["moe_runner_backend"] = "triton"
    if config.attention or on_cpu:
        arguments["attention_backend"] = config.attention or "torch_native"
    if config.kv_cache_mb or on_cpu:
        size = (config.kv_cache_mb or CPU_CACHE_MB) * 2**20
        arguments["max_total_tokens"] = max(longest + MARGIN, size // cache_bytes(checkpoint, dtype))
    if on_cpu:
        # SGLang refuses to start if this fraction of memory is too small, and uses no more than it needs.
        arguments["mem_fraction_static"] = 0.1
    elif not config.kv_cache_mb:
        arguments["mem_fraction_static"] = config.gpu_memory
    if config.lora_rank:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": config.lora_rank,
            "lora_target_modules": list(lora_targets),
            # One for the adapter, and one for the base weights.
            "max_loras_per_batch": 2,
            "lora_strict_loading": True,
        }
        if on_cpu:
            arguments["lora_backend"] = "torch_native"
    refuse_extra(config, arguments)
    return {**arguments, **config.extra}


def linear_names(model: Model) -> list[str]:
    """Last names of the linear layers inside the blocks of a model, which may have adapters: of those that train, so
    that a frozen vision tower has none."""
    result: set[str] = set()
    for path, module in model.trainable.named_modules():
        # PEFT freezes an adapted layer and nests it, and its adapter, deeper.
        path = path.partition(".lora_")[0].removesuffix(".base_layer")
        is_inside = any(part.isdigit() for part in path.split("."))
        if isinstance(module, torch.nn.Linear) and is_inside and module.weight.requires_grad:
            result.add(path.rpartition(".")[2])
    return sorted(result)


def cache_bytes(checkpoint: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Size of one token in the KV cache, in bytes. checkpoint: config.json in the transformers layout."""
    heads = int(checkpoint["num_attention_heads"])
    head_dim = int(checkpoint.get("head_dim") or checkpoint["hidden_size"] // heads)
    kv_heads = int(checkpoint.get("num_key_value_heads") or heads)
    return 2 * int(checkpoint["num_hidden_layers"]) * kv_heads * head_dim * dtype.itemsize


def sampling_arguments(wanted: TextRequest) -> Mapping[str, Any]:
    """SGLang's sampling parameters, shared by all samples. Raises RecipeError for a top_k of 1, which is greedy."""
    sampling = wanted.sampling
    if sampling.top_k == 1 and sampling.temperature:
        raise RecipeError(
            f"sampling.top_k: got 1 at temperature {sampling.temperature}, which SGLang treats as greedy decoding "
            "with log-probs at temperature 1. Set sampling.temperature=0."
        )
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # SGLang's value for all tokens.
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(wanted.stop_tokens),
        "stop": list(sampling.stop),
        "skip_special_tokens": True,
    }
