"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec


def _spec(name: str, summary: str, *, config: str) -> AlgorithmSpec:
    return AlgorithmSpec(
        name=name,
        summary=summary,
        build="unirl.algorithms.drpo.algorithm:build",
        config=f"unirl.algorithms.drpo.config:{config}",
        needs=Needs(track="text", log_probs="token", staleness="ratio"),
        when={"kl_coef": Needs(reference="policy")},
        stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
        proposes={"advantage.normalize": False},
        paper="arXiv 2606.09821",
        reference="unirl.algorithms.drpo.reference:loss",
        # Stale samples are weighted by their ratio except in the penalty, which conformance would see as a difference.
        trial={"delta": 1e6},
    )


DRPO = _spec(
    "drpo",
    "Policy gradient over tokens with a quadratic pull to the old policy in place of a clip",
    config="DrpoConfig",
)
SPO = _spec("spo", "DRPO with a penalty independent of the token's old probability", config="SpoConfig")


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRPO, SPO]
