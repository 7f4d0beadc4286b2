"""What this plugin provides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from unirl.core.capability import Needs
from unirl.core.config import AdvantageConfig
from unirl.core.hookspec import hookimpl
from unirl.core.kl import KlConfig, kl_reasons
from unirl.core.plan import Plan
from unirl.core.spec import AlgorithmSpec
from unirl.core.token_policy import clip_reasons, token_policy_reasons

if TYPE_CHECKING:
    from unirl.algorithms.ppo.config import PpoConfig

__all__ = ["SPEC", "unirl_algorithms", "unirl_check_plan"]

SPEC = AlgorithmSpec(
    name="ppo",
    summary="Clipped policy gradient over tokens, with advantages from a critic that trains along",
    build="unirl.algorithms.ppo.algorithm:build",
    config="unirl.algorithms.ppo.config:PpoConfig",
    needs=Needs(track="text", log_probs="token", critic=True, staleness="ratio"),
    when={"kl_coef": Needs(reference="policy")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    paper="arXiv 1707.06347",
    reference="unirl.algorithms.ppo.reference:loss",
)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [SPEC]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    if plan.algorithm.spec is not SPEC:
        return []
    from unirl.algorithms.ppo.config import PpoConfig

    config = plan.algorithm.config
    assert isinstance(config, PpoConfig)
    return [
        *_advantage(plan),
        *_ranges(config),
        *clip_reasons(config),
        *token_policy_reasons(config, plan),
        *_divergence(config, plan),
    ]


def _advantage(plan: Plan) -> Iterator[str]:
    """Settings that compare samples with each other, where here a critic is compared with."""
    for item in dataclasses.fields(AdvantageConfig):
        found = getattr(plan.advantage, item.name)
        if item.name != "constant_reward" and found != item.default:
            yield (
                f"advantage.{item.name}: {found} was asked for; the advantages of ppo come from its critic, see "
                "algorithm.gae_lambda and algorithm.whiten_advantages. Leave it out."
            )


def _ranges(config: PpoConfig) -> Iterator[str]:
    for key, value in (("gamma", config.gamma), ("gae_lambda", config.gae_lambda)):
        if not 0 <= value <= 1:
            yield f"algorithm.{key}: {value} was asked for; it must lie in [0, 1]."
    if config.clip_range_value is not None and not config.clip_range_value > 0:
        yield f"algorithm.clip_range_value: {config.clip_range_value} was asked for; it must be above 0, or null."
    if not config.value_coef > 0:
        yield f"algorithm.value_coef: {config.value_coef} was asked for; it must be above 0, or no critic learns."
    if config.aggregation not in AGGREGATIONS:
        yield (f"algorithm.aggregation: {config.aggregation!r} was asked for; it is one of {', '.join(AGGREGATIONS)}.")
    has_constant = config.aggregation == "seq-mean-token-sum-norm"
    if (config.horizon is not None) != has_constant or (config.horizon is not None and config.horizon <= 0):
        yield (
            f"algorithm.horizon: {config.horizon} was found with aggregation {config.aggregation!r}; it is a number "
            "above 0 with seq-mean-token-sum-norm, such as '${sampling.max_new_tokens}', and null otherwise."
        )


def _divergence(config: PpoConfig, plan: Plan) -> Iterator[str]:
    if not config.kl_in_reward:
        yield from kl_reasons(config, plan)
        return
    yield from kl_reasons(KlConfig(**{i.name: getattr(config, i.name) for i in dataclasses.fields(KlConfig)}), plan)
    if config.kl_estimator not in ("k1", "k2", "k3"):
        yield f"algorithm.kl_estimator: {config.kl_estimator!r} was asked for; it is one of k1, k2, k3."
    for key in ("kl_straight_through", "kl_weighs_by_ratio"):
        if getattr(config, key):
            yield (
                f"algorithm.{key}: it changes a gradient, and a divergence in the reward has none; set it to false, or "
                "algorithm.kl_in_reward=false."
            )
