"""SGLang as an external rollout engine for images and videos."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec

__all__ = ["SPEC", "unirl_engines"]

SPEC = EngineSpec(
    name="sglang",
    summary="SGLang for images and videos, in a separate process and environment, synced before each rollout",
    build="unirl.engines.sglang.engine:build",
    config="unirl.engines.sglang.config:SglangConfig",
    environment="unirl.engines.sglang.environment:ENVIRONMENT",
    needs_bridge=True,
    # To check its conditions at start-up; it decodes itself.
    model_parts=("encode",),
    reads_weights=False,
    capabilities={
        Cap.LATENT_ROLLOUT,
        Cap.SIGMAS,
        Cap.INITIAL_NOISE,
        Cap.STEP_NOISE,
        Cap.SDE_STEPS,
        Cap.SDE_STEPS_PER_GROUP,
        Cap.TRAJECTORY_WINDOW,
        Cap.TRAJECTORY_FULL,
        Cap.LOG_PROBS_GAUSSIAN,
        Cap.CONDITIONS,
        Cap.GUIDANCE,
        Cap.MEDIA_REFS,
        Cap.WEIGHTS_FULL,
        Cap.WEIGHTS_LORA,
        Cap.SLEEP,
    },
    # The step is computed by `unirl.numerics` in SGLang's loop, also where SGLang has a kernel of the same formula.
    kernels=("flow-sde", "dance-sde", "cps", "euler", "dpm2"),
    guidances=("batched", "two-pass", "norm-corrected", "interval", "two-scale"),
    enabled_by={Cap.SLEEP: {"sleep_mode": True}},
    trial={"sleep_mode": True},
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]
