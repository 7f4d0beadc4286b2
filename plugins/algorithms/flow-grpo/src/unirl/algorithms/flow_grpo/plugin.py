"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

FLOW_GRPO = AlgorithmSpec(
    name="flow-grpo",
    summary="Clipped policy gradient over the SDE steps of a flow model, with group advantages",
    build="unirl.algorithms.flow_grpo.algorithm:build",
    config="unirl.algorithms.flow_grpo.config:FlowGrpoConfig",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True, staleness="ratio"),
    # Ratio norm compares means, which are replayed with the weights that train.
    when={"kl_coef": Needs(reference="policy"), "ratio_norm": Needs(staleness="none")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    proposes={"sampling.kernel": "flow-sde", "sampling.eta": 0.7, "sampling.sde": {"mode": "all"}},
    paper="arXiv 2505.05470",
    reference="unirl.algorithms.flow_grpo.reference:loss",
    # The default suits latents of 65,536 elements; those of miniatures are a thousandth of it.
    trial={"clip_range": 1e-3},
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [FLOW_GRPO]
