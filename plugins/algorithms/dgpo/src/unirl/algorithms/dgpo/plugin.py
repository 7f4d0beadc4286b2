"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.overrides import ValueIf
from unirl.core.specs.spec import AlgorithmSpec

DGPO = AlgorithmSpec(
    name="dgpo",
    summary="DGPO: prefers the better to the worse samples of a prompt, in one comparison of the group",
    build="unirl.algorithms.dgpo.algorithm:build",
    config="unirl.algorithms.dgpo.config:DgpoConfig",
    needs=Needs(track="latent", reference="policy", staleness="any"),
    when={"moving_reference": Needs(sampler="lagged", staleness="none"), "kl_coef": Needs(reference="policy")},
    proposes={
        "sampling.kernel": "dpm2",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        # A LoRA adapter is switched off instead.
        "backend.reference_copy": ValueIf(value=True, when={"backend.trains": "full"}),
    },
    paper="arXiv 2510.08425",
    reference="unirl.algorithms.dgpo.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DGPO]
