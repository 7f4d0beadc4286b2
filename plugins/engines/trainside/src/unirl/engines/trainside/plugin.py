"""In-process rollouts with the model being trained."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="trainside",
    summary="Samples in process with the module being trained; works with every model",
    build="unirl.engines.trainside.engine:build",
    config="unirl.engines.trainside.config:TrainsideConfig",
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
        Cap.CONDITIONS,
        Cap.GUIDANCE,
        Cap.PLUGIN_SAMPLERS,
        Cap.MEDIA_REFS,
        Cap.TURNS,
        Cap.TOKEN_RULES,
        Cap.WEIGHTS_SHARED,
    },
    # Not ddim-eta: its sigmas are noise-to-signal ratios of DDPM models; these models predict velocities.
    kernels=("flow-sde", "dance-sde", "cps", "euler", "dpm2"),
    guidances=("batched", "two-pass", "norm-corrected", "interval", "two-scale", "text-image"),
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
