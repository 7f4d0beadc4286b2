"""vLLM as an external rollout engine for text."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM for text, in a separate process and environment, with weights synced before each rollout",
    build="unirl.engines.vllm.engine:build",
    config="unirl.engines.vllm.config:VllmConfig",
    environment="unirl.engines.vllm.environment:ENVIRONMENT",
    reads_weights=False,
    capabilities={
        Cap.TEXT_ROLLOUT,
        Cap.SEEDS,
        Cap.LOG_PROBS_TOKEN,
        Cap.CONDITIONS,
        Cap.MEDIA_REFS,
        Cap.WEIGHTS_FULL,
        Cap.WEIGHTS_LORA,
        Cap.SLEEP,
    },
    # As in `trial`, so that conformance starts one engine only.
    enabled_by={Cap.WEIGHTS_LORA: {"lora_rank": 64}, Cap.SLEEP: {"sleep_mode": True}},
    # Backends train adapters by default.
    trial={"kv_cache_mb": 64, "max_num_seqs": 16, "lora_rank": 64, "sleep_mode": True},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
