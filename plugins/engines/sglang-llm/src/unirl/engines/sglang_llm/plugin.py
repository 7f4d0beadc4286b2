"""SGLang as an external rollout engine for text."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="sglang-llm",
    summary="SGLang for text, in a separate process and environment, with weights synced before each rollout",
    build="unirl.engines.sglang_llm.engine:build",
    config="unirl.engines.sglang_llm.config:SglangConfig",
    environment="unirl.engines.sglang_llm.environment:ENVIRONMENT",
    reads_weights=False,
    capabilities={
        Cap.LATENT_ROLLOUT: Support.NO,
        Cap.TEXT_ROLLOUT: Support.NATIVE,
        Cap.SIGMAS: Support.NO,
        Cap.INITIAL_NOISE: Support.NO,
        Cap.STEP_NOISE: Support.NO,
        Cap.SEEDS: Support.NATIVE,
        Cap.SDE_STEPS: Support.NO,
        Cap.SDE_STEPS_PER_GROUP: Support.NO,
        Cap.TRAJECTORY_WINDOW: Support.NO,
        Cap.TRAJECTORY_FULL: Support.NO,
        Cap.LOG_PROBS_GAUSSIAN: Support.NO,
        Cap.LOG_PROBS_TOKEN: Support.NATIVE,
        Cap.CONDITIONS: Support.NATIVE,
        Cap.GUIDANCE: Support.NO,
        Cap.PLUGIN_SAMPLERS: Support.NO,
        Cap.MEDIA_REFS: Support.NATIVE,
        Cap.WEIGHTS_SHARED: Support.NO,
        Cap.WEIGHTS_FULL: Support.NATIVE,
        Cap.WEIGHTS_LORA: Support.NATIVE,
        # SGLang releases no memory on a CPU, and its memory saver on CUDA has not been tested with this engine.
        Cap.SLEEP: Support.NO,
    },
    # As in `trial`, so that conformance starts one engine only.
    enabled_by={Cap.WEIGHTS_LORA: {"lora_rank": 64}},
    # Backends train adapters by default.
    trial={"kv_cache_mb": 64, "max_num_seqs": 16, "lora_rank": 64},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
