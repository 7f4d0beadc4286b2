"""The reward `remote`."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardSpec

__all__ = ["REMOTE", "unirl_rewards"]

REMOTE = RewardSpec(
    name="remote",
    summary="A scorer of a reward service, on one or several replicas",
    build="unirl.reward_service.remote.reward:build",
    config="unirl.reward_service.remote.config:RemoteConfig",
    capabilities={Cap.REWARD_SAMPLE},
    trial={"urls": ["http://127.0.0.1:8790"], "scorer": "brightness"},
    tiny="unirl.reward_service.remote.trial_service:write",
    scale="that of the scorer, as `unirl reward-service check URL` shows it; unbounded here",
    media="any",
)


@hookimpl
def unirl_rewards() -> Iterable[RewardSpec]:
    return [REMOTE]
