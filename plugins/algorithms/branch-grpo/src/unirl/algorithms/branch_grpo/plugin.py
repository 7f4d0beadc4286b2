"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

BRANCH_GRPO = AlgorithmSpec(
    name="branch-grpo",
    summary="Clipped policy gradient over a tree of samples per group, with advantages for every step",
    build="unirl.algorithms.branch_grpo.algorithm:build",
    config="unirl.algorithms.branch_grpo.config:BranchGrpoConfig",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True, staleness="ratio"),
    clip_key="clip_range",
    paper="arXiv 2509.06040",
    reference="unirl.algorithms.branch_grpo.reference:loss",
    # The default suits latents of 65,536 elements; those of miniatures are a thousandth of it.
    trial={"clip_range": 1e-3},
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [BRANCH_GRPO]
