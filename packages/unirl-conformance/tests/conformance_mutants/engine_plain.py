"""An engine that promises little and keeps it: the claims must do without what it does not give."""

from __future__ import annotations

import dataclasses
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

__all__ = ["SPECS", "PlainEngine", "build"]

UNSTATED = (Cap.CONDITIONS, Cap.GUIDANCE, Cap.LOG_PROBS_GAUSSIAN, Cap.PLUGIN_SAMPLERS, Cap.STEP_NOISE)


def _without(name: str, *caps: Cap, kernels: tuple[str, ...] = TRAINSIDE.kernels) -> EngineSpec:
    return dataclasses.replace(
        TRAINSIDE,
        name=name,
        build=f"{__name__}:build",
        kernels=kernels,
        capabilities=TRAINSIDE.capabilities - {*caps, Cap.TEXT_ROLLOUT},
    )


SPECS = [
    _without("plain", *UNSTATED, Cap.TRAJECTORY_FULL),
    _without("plain-full", *UNSTATED, Cap.INITIAL_NOISE, Cap.TRAJECTORY_WINDOW),
    _without("plain-end", *UNSTATED, Cap.TRAJECTORY_FULL, Cap.TRAJECTORY_WINDOW, Cap.SDE_STEPS, kernels=("euler",)),
    _without("plain-blind", *UNSTATED, Cap.TRAJECTORY_FULL, Cap.TRAJECTORY_WINDOW, Cap.INITIAL_NOISE),
]


class PlainEngine(TrainsideEngine):
    """Draws its own step noise, returns no conditions and no log-probs, refuses guidance."""

    kernels: tuple[str, ...] = TRAINSIDE.kernels

    def generate(self, request: Request) -> Track:
        sampling = request.latent.sampling
        if sampling.guidance_scale != 1.0:
            raise RecipeError("sampling.guidance_scale: guidance was asked for; this engine has none.")
        if sampling.kernel not in self.kernels:
            raise RecipeError(f"sampling.kernel: {sampling.kernel!r} was asked for; it has {self.kernels}.")
        own = dataclasses.replace(request, sample_ids=tuple(f"own/{name}" for name in request.sample_ids))
        track = super().generate(own)
        return dataclasses.replace(
            track,
            sample_ids=request.sample_ids,
            conditions={},
            segment=dataclasses.replace(track.latent, log_probs=None),
        )


def build(config: Any, *, model: Any, device: Any) -> PlainEngine:
    engine = PlainEngine(config, model=model)
    engine.kernels = next(spec.kernels for spec in SPECS if spec.name == config.use)
    return engine
