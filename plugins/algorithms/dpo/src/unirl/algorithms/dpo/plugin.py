"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

DPO = AlgorithmSpec(
    name="dpo",
    summary="DPO: prefers the best to the worst completion of a prompt, of rollouts or of stored pairs",
    build="unirl.algorithms.dpo.algorithm:build",
    config="unirl.algorithms.dpo.config:DpoConfig",
    needs=Needs(track="text", reference="policy", staleness="any"),
    # As many pairs of a trial's groups as there can be.
    trial={"pairs_per_group": 8},
    paper="arXiv 2305.18290",
    reference="unirl.algorithms.dpo.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DPO]
