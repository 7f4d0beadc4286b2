"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

AWM = AlgorithmSpec(
    name="awm",
    summary="Advantage weighted matching: clipped policy gradients with the flow-matching loss in place of log-probs",
    build="unirl.algorithms.awm.algorithm:build",
    config="unirl.algorithms.awm.config:AwmConfig",
    needs=Needs(track="latent", staleness="none"),
    when={"kl_coef": Needs(reference="policy"), "lagged_coef": Needs(sampler="lagged")},
    clip_key="clip_range",
    proposes={"sampling.kernel": "dpm2", "sampling.eta": 0.0, "sampling.sde": {"mode": "none"}},
    paper="arXiv 2509.25050",
    reference="unirl.algorithms.awm.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [AWM]
