"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

__all__ = ["FLOW_PPO", "SPEC", "unirl_algorithms"]

SPEC = AlgorithmSpec(
    name="ppo",
    summary="Clipped policy gradient over tokens, with advantages from a learned critic",
    build="unirl.algorithms.ppo.algorithm:build",
    config="unirl.algorithms.ppo.config:PpoConfig",
    needs=Needs(track="text", log_probs="token", critic=True, staleness="ratio"),
    when={"kl_coef": Needs(reference="policy")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    correction_key="tis",
    paper="arXiv 1707.06347",
    reference="unirl.algorithms.ppo.reference:loss",
)

FLOW_PPO = AlgorithmSpec(
    name="flow-ppo",
    summary="Clipped policy gradient over denoise steps, with advantages from a learned critic",
    build="unirl.algorithms.ppo.flow_ppo:build",
    config="unirl.algorithms.ppo.config:FlowPpoConfig",
    needs=Needs(
        track="latent",
        trajectory="window",
        log_probs="gaussian",
        stochastic=True,
        critic=True,
        staleness="ratio",
    ),
    when={"kl_coef": Needs(reference="policy")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    paper="arXiv 1707.06347",
    reference="unirl.algorithms.ppo.flow_reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [SPEC, FLOW_PPO]
