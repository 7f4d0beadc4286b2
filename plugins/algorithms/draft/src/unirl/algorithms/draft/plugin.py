"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DRAFT = AlgorithmSpec(
    name="draft",
    summary="Backpropagates differentiable rewards through the last denoise steps: DRaFT-K and DRaFT-LV",
    build="unirl.algorithms.draft.algorithm:build",
    config="unirl.algorithms.draft.config:DraftConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    paper="arXiv 2309.17400",
    reference="unirl.algorithms.draft.reference:loss",
)

REFL = replace(
    DRAFT,
    name="refl",
    summary="Backpropagates differentiable rewards through one late denoise step, drawn at random",
    config="unirl.algorithms.draft.config:ReflConfig",
    # Miniatures have four steps.
    trial={"stop_window": 3},
    paper="arXiv 2304.05977",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRAFT, REFL]
