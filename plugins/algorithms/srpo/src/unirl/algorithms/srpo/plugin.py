"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

SRPO = AlgorithmSpec(
    name="srpo",
    summary="Backpropagates rewards of phrases through one step from noised clean latents: Direct-Align",
    build="unirl.algorithms.srpo.algorithm:build",
    config="unirl.algorithms.srpo.config:SrpoConfig",
    needs=Needs(track="latent", reward="differentiable", staleness="none"),
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        "train.updates_per_step": 1,
    },
    paper="arXiv 2509.06942",
    reference="unirl.algorithms.srpo.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [SRPO]
