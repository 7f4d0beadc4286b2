"""vLLM as a rollout engine for text, in a process and an environment of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.capability import Cap, Support
from unirl.core.hookspec import hookimpl
from unirl.core.hosted_text import setting_reasons
from unirl.core.spec import EngineSpec

if TYPE_CHECKING:
    from unirl.core.plan import Plan

__all__ = ["SPEC", "unirl_check_plan", "unirl_engines"]

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM for text, in a process and an environment of its own, with weights sent before each rollout",
    build="unirl.engines.vllm.engine:build",
    config="unirl.engines.vllm.config:VllmConfig",
    environment="unirl.engines.vllm.environment:ENVIRONMENT",
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
        Cap.CONDITIONS: Support.NO,
        Cap.GUIDANCE: Support.NO,
        Cap.MEDIA_REFS: Support.NO,
        Cap.WEIGHTS_SHARED: Support.NO,
        Cap.WEIGHTS_FULL: Support.NATIVE,
        Cap.WEIGHTS_LORA: Support.NATIVE,
        # On a CPU vLLM gives no memory back, and its sleep mode on CUDA has not been tried with this engine.
        Cap.SLEEP: Support.NO,
    },
    refuses={
        "qwen3-moe": "it holds the experts of a mixture in another form than they train in, so their weights could not "
        "be sent"
    },
    # As in `trial`, so that conformance needs one start.
    enabled_by={Cap.WEIGHTS_LORA: {"lora_rank": 64}},
    # Backends train adapters unless they are told otherwise.
    trial={"kv_cache_mb": 64, "max_num_seqs": 16, "lora_rank": 64},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    return setting_reasons(plan) if plan.engine.spec is SPEC else []
