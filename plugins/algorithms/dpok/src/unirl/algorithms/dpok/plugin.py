"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

__all__ = ["SPEC", "unirl_algorithms"]

SPEC = AlgorithmSpec(
    name="dpok",
    summary="Clipped policy gradient over denoise steps, with a penalty on the velocity's distance to the reference",
    build="unirl.algorithms.dpok.algorithm:build",
    config="unirl.algorithms.dpok.config:DpokConfig",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True, staleness="ratio"),
    when={"kl_coef": Needs(reference="policy"), "critic": Needs(critic=True)},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    paper="arXiv 2305.16381",
    reference="unirl.algorithms.dpok.reference:loss",
    # Beside a weight of 100 the penalty would be less than the rounding of the loss.
    trial={"reward_weight": 1.0, "clip_range": 1e-3},
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [SPEC]
