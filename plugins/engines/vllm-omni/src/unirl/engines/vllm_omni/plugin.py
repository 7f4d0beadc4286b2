"""vLLM-Omni as an external rollout engine for images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="vllm-omni",
    summary="vLLM-Omni for images, in a separate process and environment, with weights synced before each rollout",
    build="unirl.engines.vllm_omni.engine:build",
    config="unirl.engines.vllm_omni.config:VllmOmniConfig",
    environment="unirl.engines.vllm_omni.environment:ENVIRONMENT",
    releases=("0.30.0",),
    needs_bridge=True,
    # To check its conditions at start-up; it decodes itself.
    model_parts=("encode",),
    reads_weights=False,
    capabilities={
        Cap.LATENT_ROLLOUT: Support.NATIVE,
        Cap.TEXT_ROLLOUT: Support.NO,
        Cap.SIGMAS: Support.NATIVE,
        Cap.INITIAL_NOISE: Support.NATIVE,
        Cap.STEP_NOISE: Support.NATIVE,
        Cap.SEEDS: Support.NO,
        Cap.SDE_STEPS: Support.NATIVE,
        Cap.SDE_STEPS_PER_GROUP: Support.NATIVE,
        Cap.TRAJECTORY_WINDOW: Support.NATIVE,
        Cap.TRAJECTORY_FULL: Support.NATIVE,
        Cap.LOG_PROBS_GAUSSIAN: Support.NATIVE,
        Cap.LOG_PROBS_TOKEN: Support.NO,
        Cap.CONDITIONS: Support.NATIVE,
        Cap.GUIDANCE: Support.NATIVE,
        Cap.PLUGIN_SAMPLERS: Support.NO,
        Cap.MEDIA_REFS: Support.NATIVE,
        Cap.WEIGHTS_SHARED: Support.NO,
        Cap.WEIGHTS_FULL: Support.NATIVE,
        Cap.WEIGHTS_LORA: Support.NATIVE,
        Cap.SLEEP: Support.NATIVE,
    },
    kernels=("flow-sde", "dance-sde", "cps", "euler", "dpm2"),
    guidances=("batched", "two-pass", "norm-corrected", "interval", "two-scale"),
    enabled_by={Cap.SLEEP: {"sleep_mode": True}},
    trial={"sleep_mode": True},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
