"""Engines that are broken in one way each, next to those that are well."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from unirl.conformance.doubles import model as latent_model
from unirl.conformance.doubles import text_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

from conformance_mutants import (
    engine_adapters,
    engine_copying,
    engine_manners,
    engine_noise,
    engine_plain,
    engine_rollouts,
    engine_text,
    engine_trajectories,
    engine_weights,
)
from conformance_mutants.mutant import Mutant

MODULES = (
    engine_rollouts,
    engine_noise,
    engine_trajectories,
    engine_manners,
    engine_weights,
    engine_adapters,
    engine_text,
)
BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: mutant for module in MODULES for kind, mutant in module.BROKEN.items()
}
MUTANTS: list[Mutant] = list(BROKEN.values())
LEFT_OUT = (Cap.CONDITIONS, Cap.LOG_PROBS_GAUSSIAN, Cap.SDE_STEPS_PER_GROUP, Cap.SIGMAS, Cap.TEXT_ROLLOUT)
WELL: list[EngineSpec] = [
    TRAINSIDE,
    engine_copying.SPEC,
    engine_weights.BREAKS_OFF,
    *engine_plain.SPECS,
    engine_text.SPEC,
]


def build(config: Any, *, model: Any, device: Any) -> TrainsideEngine:
    """The engine that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model)


def catalog() -> Catalog:
    specs = [
        dataclasses.replace(_like(kind), name=mutant.name, build=f"{__name__}:build") for kind, mutant in BROKEN.items()
    ]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC, text_model.SPEC]),
                unirl_engines=hookimpl(lambda: WELL),
            ),
            "unirl-mutants": SimpleNamespace(unirl_engines=hookimpl(lambda: specs)),
        }
    )


def _like(kind: type[TrainsideEngine]) -> EngineSpec:
    """The spec of the engine that a mutant was made from, for one kind of track; where weights are wrong, less of its
    rollouts."""
    if kind in engine_text.BROKEN:
        return engine_text.TEXT_ONLY
    if issubclass(kind, engine_copying.CopyingEngine):
        return dataclasses.replace(
            engine_copying.SPEC,
            kernels=("flow-sde",),
            capabilities=engine_copying.SPEC.capabilities - {*LEFT_OUT},
        )
    if issubclass(kind, engine_plain.PlainEngine):
        return engine_plain.SPECS[0]
    return dataclasses.replace(TRAINSIDE, capabilities=TRAINSIDE.capabilities - {Cap.TEXT_ROLLOUT})
