"""The reward `remote`: a scorer of a reward service."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import RewardSpec

__all__ = ["REMOTE", "unirl_rewards"]

REMOTE = RewardSpec(
    name="remote",
    summary="A scorer of a reward service, on one or several replicas",
    build="unirl.rewards.remote.reward:build",
    config="unirl.rewards.remote.config:RemoteConfig",
    capabilities={
        Cap.REWARD_SAMPLE: Support.NATIVE,
        Cap.REWARD_GROUP: Support.NO,
        Cap.REWARD_DIFFERENTIABLE: Support.NO,
    },
    trial={"urls": ["http://127.0.0.1:8790"], "scorer": "brightness"},
    tiny="unirl.rewards.remote.trial_service:write",
    scale="that of the scorer, as `unirl reward-service check URL` shows it; unbounded here",
    media="any",
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [REMOTE]
