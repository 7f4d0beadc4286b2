"""The hooks of plugin API version 1. A plugin implements those it needs with `@hookimpl` in its `plugin.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ..limits import Reason
    from ..roles import WeightUpdate
    from ..specs.plan import Plan
    from ..specs.spec import (
        AlgorithmSpec,
        BackendSpec,
        EngineSpec,
        EnvironmentSpec,
        LauncherSpec,
        ModelSpec,
        RewardSpec,
        TrackerSpec,
        TransportSpec,
    )
    from ..types.event import Event

__all__ = ["API_GROUP", "HookSpecs", "hookimpl", "hookspec"]

API_GROUP = "unirl.v1"
"""Entry-point group of plugins for this version of the hook API."""

hookspec = pluggy.HookspecMarker("unirl")
hookimpl = pluggy.HookimplMarker("unirl")


class HookSpecs:
    """Every hook and its return type."""

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
    def unirl_environments(self) -> Iterable[EnvironmentSpec]:
        """The environments that this plugin provides."""
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
    def unirl_kernels(self) -> Iterable[str]:
        """The SDE kernels that this plugin provides, `module:Class` each: the names that `sampling.kernel` takes.

        Classes inherit `unirl.numerics.diffusion.kernels.Kernel`. Their modules are imported when a recipe names them.
        """
        raise NotImplementedError

    @hookspec
    def unirl_guidances(self) -> Iterable[str]:
        """The guidances that this plugin provides, `module:Class` each: the names that `sampling.guidance_mode` takes.

        Classes inherit `unirl.numerics.diffusion.guidance.Guidance`. Their modules are imported when a recipe names
        them.
        """
        raise NotImplementedError

    @hookspec
    def unirl_check_plan(self, plan: Plan) -> Iterable[Reason]:
        """Reasons to refuse this plan that concern several parts; none to accept it.

        A part's own settings are checked by the limits of its config fields and by `PartConfig.problems`.
        """
        raise NotImplementedError

    @hookspec
    def unirl_event(self, event: Event) -> None:
        """Observe one event of a run."""

    @hookspec
    def unirl_step_flops(self, plan: Plan) -> Mapping[str, float]:
        """Predicted floating-point operations of each device in a step of this plan: `generate` and `train`, the latter
        with old log-probs and the reference policy. Empty where they are not predicted."""
        raise NotImplementedError

    @hookspec
    def unirl_write_adapters(
        self, plan: Plan, updates: Mapping[str, WeightUpdate], run: Path, folder: Path, step: int
    ) -> bool:
        """Write the adapters of a run into `folder`, which exists and is empty, for other programs; True.

        updates: learner -> its `lora` weights, whole and on the CPU.  run: the run folder.  step: steps completed.
        """
        raise NotImplementedError

    @hookspec
    def unirl_explain_failure(self, plan: Plan, error: BaseException) -> str:
        """A note for the user on the error that ended a run of this plan, such as settings that need less memory; empty
        where there is nothing to add."""
        raise NotImplementedError
