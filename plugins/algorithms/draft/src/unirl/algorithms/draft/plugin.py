"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DRAFT = AlgorithmSpec(
    name="draft",
    summary="Backpropagates differentiable rewards through the last denoise steps: DRaFT-K and DRaFT-LV",
    build="unirl.algorithms.draft.algorithm:build",
    config="unirl.algorithms.draft.config:DraftConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        "train.updates_per_step": 1,
    },
    paper="arXiv 2309.17400",
    reference="unirl.conformance.reference:reward_loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRAFT]
