"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.capability import Needs
from unirl.core.hookspec import hookimpl
from unirl.core.kl import kl_reasons
from unirl.core.plan import Plan
from unirl.core.spec import AlgorithmSpec


def _spec(name: str, summary: str, *, config: str) -> AlgorithmSpec:
    return AlgorithmSpec(
        name=name,
        summary=summary,
        build="unirl.algorithms.drpo.algorithm:build",
        config=f"unirl.algorithms.drpo.config:{config}",
        needs=Needs(track="text", log_probs="token", staleness="ratio"),
        when={"kl_coef": Needs(reference="policy")},
        stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
        paper="arXiv 2606.09821",
        reference="unirl.algorithms.drpo.reference:loss",
        # Old samples count by their ratio but for the pull, which conformance would take for a difference.
        trial={"delta": 1e6},
    )


DRPO = _spec(
    "drpo",
    "Policy gradient over tokens with a quadratic pull to the old policy in place of a clip",
    config="DrpoConfig",
)
SPO = _spec("spo", "DRPO whose pull does not depend on how likely a token was", config="SpoConfig")


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DRPO, SPO]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    """The settings that only these algorithms have, and their advantage."""
    spec = plan.algorithm.spec
    if spec is not DRPO and spec is not SPO:
        return []
    from unirl.algorithms.drpo.config import DrpoConfig

    config = plan.algorithm.config
    assert isinstance(config, DrpoConfig)
    reasons = list(kl_reasons(config, plan))
    if plan.advantage.normalize:
        reasons.append(
            f"advantage.normalize: true was asked for, and {spec.name} is defined with rewards that are "
            "centred in their group and not divided by its spread. Set advantage.normalize=false."
        )
    for key, value in (("delta", config.delta), ("horizon", config.horizon)):
        if value <= 0:
            reasons.append(f"algorithm.{key}: {value} was asked for; it must be above 0.")
    for key, value, known in (
        (
            "aggregation",
            config.aggregation,
            ("seq-mean-token-sum-norm", "seq-mean-token-sum", "seq-mean-token-mean", "token-mean"),
        ),
        ("truncated", config.truncated, ("keep", "mask")),
    ):
        if value not in known:
            reasons.append(f"algorithm.{key}: {value!r} was asked for; it is one of {', '.join(known)}.")
    return reasons
