"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

REFL = AlgorithmSpec(
    name="refl",
    summary="Backpropagates differentiable rewards through one late denoise step, drawn at random",
    build="unirl.algorithms.refl.algorithm:build",
    config="unirl.algorithms.refl.config:ReflConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    # Miniatures have four steps.
    trial={"stop_window": 3},
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        "train.updates_per_step": 1,
    },
    paper="arXiv 2304.05977",
    reference="unirl.conformance.reference:reward_loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [REFL]
