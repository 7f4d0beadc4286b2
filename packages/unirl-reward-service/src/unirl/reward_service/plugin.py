"""The reward `remote`, and the commands `reward-service` and `score`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardSpec

if TYPE_CHECKING:
    import click

__all__ = ["REMOTE", "unirl_commands", "unirl_rewards"]

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


@hookimpl
def unirl_commands(cli: click.Group) -> None:
    from .command import reward_service, score

    cli.add_command(reward_service)
    cli.add_command(score)
