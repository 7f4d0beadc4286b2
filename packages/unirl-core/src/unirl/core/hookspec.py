"""The hooks of the plugin API, version 1. A plugin implements those it needs with `hookimpl` in its `plugin.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from .events import Event
    from .plan import Plan
    from .spec import (
        AlgorithmSpec,
        BackendSpec,
        EngineSpec,
        LauncherSpec,
        ModelSpec,
        RewardSpec,
        TrackerSpec,
        TransportSpec,
    )

__all__ = ["API_GROUP", "RECIPES_GROUP", "HookSpecs", "hookimpl", "hookspec"]

API_GROUP = "unirl.v1"
"""Entry-point group of plugins that speak this version of the hooks."""
RECIPES_GROUP = "unirl.recipes"
"""Entry-point group of packages that hold recipe files. Static data: nothing of it is imported."""
ASSETS_GROUP = "unirl.assets"
"""Entry-point group of packages whose files recipes name as `${asset:NAME,PATH}`."""

hookspec = pluggy.HookspecMarker("unirl")
hookimpl = pluggy.HookimplMarker("unirl")


class HookSpecs:
    """Every hook, with what it must return."""

    @hookspec
    def unirl_models(self) -> Iterable[ModelSpec]:
        """The models that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_engines(self) -> Iterable[EngineSpec]:
        """The rollout engines that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_backends(self) -> Iterable[BackendSpec]:
        """The training backends that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_algorithms(self) -> Iterable[AlgorithmSpec]:
        """The algorithms that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_rewards(self) -> Iterable[RewardSpec]:
        """The rewards that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_trackers(self) -> Iterable[TrackerSpec]:
        """The trackers that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_launchers(self) -> Iterable[LauncherSpec]:
        """The launchers that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_transports(self) -> Iterable[TransportSpec]:
        """The transports that this plugin provides."""
        raise NotImplementedError

    @hookspec
    def unirl_check_plan(self, plan: Plan) -> Iterable[str]:
        """Reasons to refuse this plan, each one sentence with the key path first; none to let it pass."""
        raise NotImplementedError

    @hookspec
    def unirl_event(self, event: Event) -> None:
        """Observe one event of a run."""

    @hookspec
    def unirl_commands(self, cli: click.Group) -> None:
        """Add commands to the command line."""
