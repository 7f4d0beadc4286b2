"""Engines with one fault each, next to healthy ones."""

from __future__ import annotations

from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE

from conformance_mutants import (
    engine_copying,
    engine_manners,
    engine_plain,
    engine_rollouts,
    engine_text,
    engine_trajectories,
    engine_weights,
)
from conformance_mutants.mutant import builder, catalog_of, plugin, specs

MODULES = (engine_rollouts, engine_trajectories, engine_manners, engine_weights, engine_text)
MUTANTS = [mutant for module in MODULES for mutant in module.MUTANTS]
HEALTHY = [TRAINSIDE, engine_copying.SPEC, engine_weights.BREAKS_OFF, *engine_plain.SPECS, engine_text.SPEC]
build = builder(MUTANTS)


def catalog() -> Catalog:
    healthy = plugin(models=[latent_model.SPEC, text_model.SPEC], engines=HEALTHY)
    return catalog_of(healthy, engines=specs(MUTANTS, module=__name__))
