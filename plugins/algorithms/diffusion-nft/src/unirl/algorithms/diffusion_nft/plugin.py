"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DIFFUSION_NFT = AlgorithmSpec(
    name="diffusion-nft",
    summary="Online RL on the forward process of a flow model, with samples of a lagged policy and no log-probs",
    build="unirl.algorithms.diffusion_nft.algorithm:build",
    config="unirl.algorithms.diffusion_nft.config:DiffusionNftConfig",
    needs=Needs(track="latent", sampler="lagged", staleness="none"),
    when={"kl_coef": Needs(reference="policy")},
    proposes={
        "sampling.kernel": "dpm2",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        # Of the published code.
        "backend.lagged": {"kind": "linear", "rate": 0.001, "decay": 0.5},
    },
    paper="arXiv 2509.16117",
    reference="unirl.algorithms.diffusion_nft.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DIFFUSION_NFT]
