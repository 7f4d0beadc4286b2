"""Backends: the owners of the weights that train."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from .absent import absent

if TYPE_CHECKING:
    from pathlib import Path

    from ..specs.config import TrainConfig
    from ..types.track import Track
    from .algorithm import Algorithm
    from .engine import WeightUpdate
    from .forward import Policy
    from .model import Model

__all__ = ["Backend", "Job", "TrainReport"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A track to train on, one of those that a step of the same weights is made of."""

    track: Track
    algorithm: Algorithm
    name: str = ""
    """Name of its stage, under which the report has its metrics."""
    weight: float = 1.0
    """Factor of its loss."""
    train: TrainConfig | None = None
    """Mini-batches, micro-batches and bounds of its stage; None takes those of the backend."""
    references: Mapping[str, Model] = field(default_factory=lambda: dict[str, "Model"]())
    """Frozen models that answer for the policy `reference`: one for all samples, of several each for those whose
    metadata `teacher` has its name. Empty is the initial weights."""
    reference_guidance: float | None = None
    """Scale of the classifier-free guidance v_neg + scale (v_pos - v_neg) of the policy `reference`, wherever a loss
    asks for its velocities; None leaves it as the loss asks. The track needs negative conditions, unless it is 1."""


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """The result of one call of `Backend.train`."""

    metrics: Mapping[str, Mapping[str, float]]
    """Job -> its metrics, and those of the optimizer steps that all jobs share."""
    num_updates: int
    num_skipped: int = 0
    """Optimizer steps left out because a gradient was not finite."""

    @property
    def only(self) -> Mapping[str, float]:
        """The metrics of the single job."""
        (metrics,) = self.metrics.values()
        return metrics


class Backend(Protocol):
    """Owns the weights that train.

    Build: `build(config, *, model: Model, train: TrainConfig, steps: int, seed: int) -> Backend`; config: a
    `BackendConfig`.
    Dropout is off while it trains. A policy that is not kept is refused with a RecipeError.

    Inherit the role: methods that the spec does not promise then have defaults, which raise an error that names them.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the live policy: optimizer steps taken."""

    @abstractmethod
    def version_of(self, policy: Policy = "live") -> int:
        """Version of a policy: `version` of the live one, moves of an average, 0 of the reference.

        It rises whenever the policy's weights change. Raises RecipeError for a policy that is not kept.
        """

    @abstractmethod
    def policy(self, which: Policy = "live") -> AbstractContextManager[None]:
        """Use these weights inside the block; restores the live ones after it, also on an error."""

    @abstractmethod
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        """Optimizer steps over a rollout. Each takes a share of every job; its gradient is their weighted sum."""

    @abstractmethod
    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        """The track with the outputs of these weights, stored where a replay of the reference policy reads them.

        For a process that holds only the reference: its live weights are the initial ones. No gradient.
        """

    @abstractmethod
    def export_weights(
        self,
        *,
        policy: Policy = "live",
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None = None,
    ) -> WeightUpdate:
        """Whole weights of a policy; the update's version is `version_of(policy)`.

        Collective where there are several ranks. So is each of its tensors, which may be made when it is asked for: all
        ranks then ask for all of them, in the order of their names, and need to hold one at a time. A tensor is a copy.
        One that is asked for after the policy has moved on raises RunFailed; `dict(update.tensors)` keeps them all.

        dtypes: weight -> dtype by torch's name, to which it is rounded, as `Engine.weight_dtypes` has them.
        """

    @abstractmethod
    def adopt(self, update: WeightUpdate) -> None:
        """Take weights that another backend of the same recipe exported, and its version. `full` or `lora`.

        A module that then samples gives the very numbers of the one that trains. Raises EchoMismatch, before anything
        changes, for names, shapes or dtypes that differ from its own.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all that training needs to continue exactly: weights, optimizer, scheduler, averages, counters.

        folder: in one that exists on every machine. What never changes, such as the reference policy, is left out: a
        resumed run builds it again.
        """

    def snapshot(self) -> Callable[[Path], None] | None:
        """A copy in CPU memory of what `save` writes, as the function that writes it to a folder, file for file as
        `save` would have; None where the backend makes none, and a save takes as long as `save`.

        The function is called at most once, in another thread, while everything here may be called. The next snapshot
        is taken after it has returned, so it may use the same memory. Both are collective.
        """
        return None

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Continue from a folder of `save`. Raises CheckpointError, before anything changes, where it cannot."""

    @abstractmethod
    def end_rollout(self) -> None:
        """One rollout's updates are done: averages and lagged policies that follow rollouts move now."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights, gradients, optimizer state and averages off the device. Raises RecipeError if it cannot."""

    @abstractmethod
    def onload(self) -> None:
        """Move them back."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources. May be called twice."""

    def hold_frozen(self, model: Model) -> None:
        """With `lazy-build`: shard the `trainable` of another model as its own, and fill it: a teacher, which nothing
        trains.

        model: built lazily, its parameters without gradient. Every rank then calls it equally often. Collective.
        """
        raise absent("backend", self, "hold_frozen", "with the capability 'lazy-build'")

    def with_values(self, track: Track) -> Track:
        """With `critic`: the track with the critic's prediction before each action, as `segment.values`. No gradient.
        Collective.

        Raises RecipeError where these settings keep none.
        """
        raise absent("backend", self, "with_values", "with the capability 'critic'")
