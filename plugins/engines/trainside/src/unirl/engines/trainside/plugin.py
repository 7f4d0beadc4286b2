"""In-process rollouts with the model being trained."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="trainside",
    summary="Samples in process with the module being trained; works with every model",
    build="unirl.engines.trainside.engine:build",
    config="unirl.engines.trainside.config:TrainsideConfig",
    capabilities={
        Cap.LATENT_ROLLOUT: Support.NATIVE,
        Cap.TEXT_ROLLOUT: Support.NATIVE,
        Cap.SIGMAS: Support.NATIVE,
        Cap.INITIAL_NOISE: Support.NATIVE,
        Cap.STEP_NOISE: Support.NATIVE,
        Cap.SEEDS: Support.NATIVE,
        Cap.SDE_STEPS: Support.NATIVE,
        Cap.SDE_STEPS_PER_GROUP: Support.NATIVE,
        Cap.TRAJECTORY_WINDOW: Support.NATIVE,
        Cap.TRAJECTORY_FULL: Support.NATIVE,
        Cap.LOG_PROBS_GAUSSIAN: Support.NATIVE,
        Cap.LOG_PROBS_TOKEN: Support.NATIVE,
        Cap.CONDITIONS: Support.NATIVE,
        Cap.GUIDANCE: Support.NATIVE,
        Cap.PLUGIN_SAMPLERS: Support.NATIVE,
        Cap.MEDIA_REFS: Support.NATIVE,
        Cap.WEIGHTS_SHARED: Support.NATIVE,
        Cap.WEIGHTS_FULL: Support.NO,
        Cap.WEIGHTS_LORA: Support.NO,
        Cap.SLEEP: Support.NO,
    },
    # Not ddim-eta: its sigmas are noise-to-signal ratios of DDPM models; these models predict velocities.
    kernels=("flow-sde", "dance-sde", "cps", "euler", "dpm2"),
    guidances=("batched", "two-pass", "norm-corrected", "interval", "two-scale"),
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
