"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

EPG = AlgorithmSpec(
    name="epg",
    summary="Policy gradients with the ELBO of the final sample as log-prob: EPG, PEPG and PAR",
    build="unirl.algorithms.epg.algorithm:build",
    config="unirl.algorithms.epg.config:EpgConfig",
    needs=Needs(track="latent", staleness="none"),
    when={"kl_coef": Needs(reference="policy")},
    proposes={"sampling.kernel": "dpm2", "sampling.eta": 0.0, "sampling.sde": {"mode": "none"}},
    paper="arXiv 2602.04663",
    reference="unirl.algorithms.epg.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [EPG]
