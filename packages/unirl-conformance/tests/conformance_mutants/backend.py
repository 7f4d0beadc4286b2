"""Backends that are broken in one way each, next to the one that is well.

Each promises what its claim needs and no more, so that all claims about all of them take seconds.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from unirl.conformance.doubles import model as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import BackendSpec

from conformance_mutants import backend_critic, backend_lifetime, backend_policies, backend_training
from conformance_mutants.backend_wrapped import SPEC, Wrapped
from conformance_mutants.mutant import Mutant

BROKEN: dict[type[Wrapped], Mutant] = {
    **backend_training.BROKEN,
    **backend_policies.BROKEN,
    **backend_lifetime.BROKEN,
    **backend_critic.BROKEN,
}
MUTANTS = list(BROKEN.values())


def build(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Wrapped:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def catalog() -> Catalog:
    specs: list[BackendSpec] = [
        dataclasses.replace(
            SPEC,
            name=mutant.name,
            build=f"{__name__}:build",
            capabilities={cap for cap in SPEC.capabilities if cap in mutant.promises},
        )
        for mutant in BROKEN.values()
    ]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC]), unirl_backends=hookimpl(lambda: [SPEC])
            ),
            "unirl-mutants": SimpleNamespace(unirl_backends=hookimpl(lambda: specs)),
        }
    )
