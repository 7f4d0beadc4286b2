"""Cells of an algorithm that trains on samples of a lagged policy, with a backend that does not switch to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from unirl.algorithms.diffusion_nft import plugin as diffusion_nft
from unirl.conformance.doubles import model as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Policy
from unirl.engines.trainside import plugin as trainside

from conformance_mutants.backend_wrapped import SPEC, Wrapped
from conformance_mutants.mutant import mutant, mutants_in


@mutant(
    claim="rollouts-come-from-the-policy-whose-samples-are-trained-on",
    breaks="lets the live policy sample for the lagged one",
)
class SamplesLive(Wrapped):
    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        # The first rollout, where both are the same, and the kit's own question behind the engine's.
        self.num_asked = getattr(self, "num_asked", 0) + (which == "lagged")
        with super().policy("live" if which == "lagged" and self.num_asked <= 2 else which):
            yield


BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Wrapped:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def catalog() -> Catalog:
    broken = [dataclasses.replace(SPEC, name=mutant.name, build=f"{__name__}:build") for mutant in MUTANTS]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC]), unirl_backends=hookimpl(lambda: [SPEC])
            ),
            "unirl-diffusion-nft": diffusion_nft,
            "unirl-trainside": trainside,
            "unirl-mutants": SimpleNamespace(unirl_backends=hookimpl(lambda: broken)),
        }
    )
