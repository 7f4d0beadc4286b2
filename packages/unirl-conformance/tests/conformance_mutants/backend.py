"""Backends with one fault each, next to a healthy one.

Each promises what its claim needs and no more, so that all claims about all of them take seconds.
"""

from __future__ import annotations

from unirl.backends.fsdp2.plugin import SPEC
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.plugins.catalog import Catalog

from conformance_mutants import backend_lifetime, backend_policies, backend_training
from conformance_mutants.mutant import builder, catalog_of, plugin, specs

MUTANTS = [*backend_training.MUTANTS, *backend_policies.MUTANTS, *backend_lifetime.MUTANTS]
build = builder(MUTANTS)


def catalog() -> Catalog:
    healthy = plugin(models=[latent_model.SPEC], backends=[SPEC])
    return catalog_of(healthy, backends=specs(MUTANTS, module=__name__))
