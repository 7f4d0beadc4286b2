"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DRAFT = AlgorithmSpec(
    name="draft",
    summary="Backpropagates differentiable rewards through the last denoise steps: DRaFT-K, DRaFT-LV and ReFL",
    build="unirl.algorithms.draft.algorithm:build",
    config="unirl.algorithms.draft.config:DraftConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    paper="arXiv 2309.17400",
    reference="unirl.algorithms.draft.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRAFT]
