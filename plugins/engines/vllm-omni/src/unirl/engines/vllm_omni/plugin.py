"""vLLM-Omni as an external rollout engine for images, and for the texts of models that also write."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="vllm-omni",
    summary="vLLM-Omni for images, and texts of models that also write, in a separate process and environment",
    build="unirl.engines.vllm_omni.engine:build",
    config="unirl.engines.vllm_omni.config:VllmOmniConfig",
    environment="unirl.engines.vllm_omni.environment:ENVIRONMENT",
    releases=("0.30.0",),
    needs_bridge=True,
    # To check its conditions at start-up; it decodes itself.
    model_parts=("encode",),
    reads_weights=False,
    capabilities={
        Cap.LATENT_ROLLOUT,
        Cap.TEXT_ROLLOUT,
        Cap.SIGMAS,
        Cap.INITIAL_NOISE,
        Cap.STEP_NOISE,
        Cap.SEEDS,
        Cap.SDE_STEPS,
        Cap.SDE_STEPS_PER_GROUP,
        Cap.TRAJECTORY_WINDOW,
        Cap.TRAJECTORY_FULL,
        Cap.LOG_PROBS_GAUSSIAN,
        Cap.LOG_PROBS_TOKEN,
        Cap.TOKEN_RULES,
        Cap.CONDITIONS,
        Cap.GUIDANCE,
        Cap.MEDIA_REFS,
        Cap.TURNS,
        Cap.WEIGHTS_FULL,
        Cap.WEIGHTS_LORA,
        Cap.SLEEP,
    },
    kernels=("flow-sde", "dance-sde", "cps", "euler", "dpm2"),
    guidances=("batched", "two-pass", "norm-corrected", "interval", "two-scale", "text-image"),
    enabled_by={Cap.SLEEP: {"sleep_mode": True}},
    trial={"sleep_mode": True},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
