"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DRTUNE = AlgorithmSpec(
    name="drtune",
    summary="Backpropagates differentiable rewards at denoise steps spread over the trajectory",
    build="unirl.algorithms.drtune.algorithm:build",
    config="unirl.algorithms.drtune.config:DrtuneConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    # Miniatures have four steps.
    trial={"gradient_steps": 2, "stop_window": 2},
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        "train.updates_per_step": 1,
    },
    paper="arXiv 2405.00760",
    reference="unirl.conformance.reference:reward_loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRTUNE]
