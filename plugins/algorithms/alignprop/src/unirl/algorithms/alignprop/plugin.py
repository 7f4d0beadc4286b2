"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

ALIGNPROP = AlgorithmSpec(
    name="alignprop",
    summary="Backpropagates differentiable rewards through a random number of last denoise steps",
    build="unirl.algorithms.alignprop.algorithm:build",
    config="unirl.algorithms.alignprop.config:AlignpropConfig",
    needs=Needs(track="latent", trajectory="full", reward="differentiable", staleness="none"),
    # Trials have four steps and more; all of them would only take longer.
    trial={"max_gradient_steps": 3},
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        "train.updates_per_step": 1,
    },
    paper="arXiv 2310.03739",
    reference="unirl.conformance.reference:reward_loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [ALIGNPROP]
