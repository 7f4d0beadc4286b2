"""Backends that are broken in one way each, next to the one that is well.

Each promises what its claim needs and no more, so that all claims about all of them take seconds.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.backends.fsdp2.plugin import SPEC
from unirl.conformance.workbench import model as workbench
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Catalog
from unirl.core.hookspec import hookimpl
from unirl.core.spec import BackendSpec

from conformance_mutants import backend_critic, backend_lifetime, backend_policies, backend_training
from conformance_mutants.mutant import Mutant

BROKEN: dict[type[Fsdp2Backend], tuple[Mutant, tuple[Cap, ...]]] = {
    **backend_training.BROKEN,
    **backend_policies.BROKEN,
    **backend_lifetime.BROKEN,
    **backend_critic.BROKEN,
}
"""Each with the capabilities that it promises."""
MUTANTS = [mutant for mutant, _ in BROKEN.values()]


def build(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Fsdp2Backend:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, (mutant, _) in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def catalog() -> Catalog:
    specs: list[BackendSpec] = [
        dataclasses.replace(
            SPEC,
            name=mutant.name,
            build=f"{__name__}:build",
            capabilities={cap: Support.NATIVE if cap in caps else Support.NO for cap in SPEC.capabilities},
        )
        for mutant, caps in BROKEN.values()
    ]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [workbench.SPEC]), unirl_backends=hookimpl(lambda: [SPEC])
            ),
            "unirl-mutants": SimpleNamespace(unirl_backends=hookimpl(lambda: specs)),
        }
    )
