"""What algorithms and backends do: loss terms over a track, and whoever owns the weights that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ..array import Array

if TYPE_CHECKING:
    from ..config import LatentSamplingConfig
    from ..request import LatentRequest
    from ..track import Track
    from .engine import WeightUpdate

__all__ = [
    "Algorithm",
    "Backend",
    "LatentAlgorithm",
    "LossTermLike",
    "Losses",
    "Metric",
    "Policy",
    "Replay",
    "ReplayedLike",
    "StatefulAlgorithm",
    "TrainReport",
]

Policy = Literal["live", "reference", "ema", "lagged"]
"""Which weights a forward uses: those that train, the initial ones, their average, or the lagged policy."""


class ReplayedLike(Protocol):
    """What a replay gives back, of either kind of track.

    `unirl.numerics.replay.Replayed` of latent tracks has the transitions as well, and S is their SDE steps;
    `unirl.numerics.text_replay.ReplayedTokens` of text tracks has the entropy, and S is the longest text of the rows.
    """

    @property
    def log_probs(self) -> Array:
        """[n, S] fp32, 0 where not valid."""
        ...

    @property
    def valid(self) -> Array:
        """[n, S] bool: False is no step or no token."""
        ...


class Replay(Protocol):
    """Recomputes a track's transitions with the weights of a policy; with gradient for `live`, unless in no_grad."""

    def __call__(self, track: Track, *, policy: Policy = "live") -> ReplayedLike: ...


class LossTermLike(Protocol):
    """One term of a loss: per-element values, their weights, a scale. See `unirl.numerics.reduction.LossTerm`."""

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Array: ...
    @property
    def weights(self) -> Array: ...
    @property
    def scale(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that adds up over micro-batches and ranks."""

    total: float
    weight: float = 1.0
    reduce: Literal["mean", "max", "sum"] = "mean"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What an algorithm returns for one micro-batch."""

    terms: Sequence[LossTermLike]
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict[str, Metric]())


class Algorithm(Protocol):
    """What is asked of a rollout, and loss terms over it.

    Build: `build(config, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float], train: TrainConfig)`.
    """

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track with its advantages, and numbers for the log. Reads `rewards` and `reward_parts`."""
        ...

    def anchor(self, track: Track, replay: Replay) -> Track:
        """Freeze what the updates compare with (old log-probs, old means), before the first update.

        Called once per micro-batch, at the very geometry of the updates, without gradient.
        """
        ...

    def weights(self, track: Track) -> Mapping[str, Array]:
        """Weights of each term for these rows, without any forward: name -> [n, ...].

        The stack sums them over all micro-batches and ranks before the first backward; a term is divided by its sum.
        """
        ...

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        """Loss terms of one micro-batch. `progress` rises from 0 to 1 over the run."""
        ...


@runtime_checkable
class StatefulAlgorithm(Protocol):
    """An algorithm that goes on from step to step with something besides the weights, such as a coefficient.

    Asked of the algorithm of the process that drives the run; where others train, what `state` gives goes to their
    copies with each call of train. `end_step` is therefore the one place where the state may change.
    """

    def end_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Move the state to that of the next step; returns numbers for the log of this one.

        metrics: of the whole step over all micro-batches, updates and ranks, as they are logged (`<track>/<name>`
        where there are several tracks), and `samples`, the number of them. What only updates give is missing in a step
        without any.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """What the next step needs, as plain JSON: numbers, texts, truth values, None, and lists and mappings of them.

        Empty where these settings need none. The mapping is kept, so the algorithm must not change it later.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. Raises ValueError, before anything changes, for what it cannot have given."""
        ...


class LatentAlgorithm(Algorithm, Protocol):
    """An algorithm for latent tracks: it also says which of their steps are stochastic."""

    def latent_request(
        self,
        sampling: LatentSamplingConfig,
        *,
        sigmas: Array,
        latent_shape: tuple[int, ...],
        seed: int,
        rollout: int,
        sample_ids: Sequence[str],
        group_ids: Sequence[str],
    ) -> LatentRequest:
        """How a latent track is to be sampled so that this algorithm can train on it: noise ids and SDE steps."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What one call of `Backend.train` did."""

    metrics: Mapping[str, float]
    num_updates: int
    num_skipped: int = 0
    """Optimizer steps left out because a gradient was not finite."""


class Backend(Protocol):
    """Owns the weights that train.

    Build: `build(config, *, model: Model, train: TrainConfig, steps: int, seed: int) -> Backend`; config: a
    `BackendConfig`.
    Dropout is off while it trains. A policy that is not kept is refused with a RecipeError.
    """

    version: int
    """Policy version: optimizer steps taken."""

    def policy(self, which: Policy = "live") -> AbstractContextManager[None]:
        """Use these weights inside the block; restores the live ones after it, also on an error."""
        ...

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport: ...
    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        """The track with what these weights say of it, where a replay of the reference policy then finds it.

        For a process that holds the reference alone: there the live weights are the initial ones. No gradient.
        """
        ...

    def weights(self, *, policy: Policy = "live", kind: Literal["full", "lora", "merged"]) -> WeightUpdate: ...
    def adopt(self, update: WeightUpdate) -> None:
        """Take weights that another backend of the same recipe exported, and its version. `full` or `lora`.

        A module that then samples gives the very numbers of the one that trains. Raises EchoMismatch, before anything
        changes, for names, shapes or dtypes that are not those of `weights`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything that training needs to go on exactly: weights, optimizer, scheduler, averages, counters."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises CheckpointError, before anything changes, when that cannot be done."""
        ...

    def end_rollout(self) -> None:
        """One rollout's updates are done: averages and lagged policies that follow rollouts move now."""
        ...

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def close(self) -> None:
        """Let go of what it holds. May be called twice."""
        ...
