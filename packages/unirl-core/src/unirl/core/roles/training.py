"""Algorithms and backends: loss terms over a track, and the owner of the weights that train."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..types.array import Array
from .absent import absent

if TYPE_CHECKING:
    from pathlib import Path

    from ..specs.config import TrainConfig
    from ..types.track import Track
    from .engine import WeightUpdate
    from .model import DivergenceKind, Model

__all__ = [
    "Algorithm",
    "Backend",
    "Forward",
    "Job",
    "LossTerm",
    "Losses",
    "Metric",
    "Policy",
    "Replayed",
    "ReplayedTokens",
    "TrainReport",
]

Policy = Literal["live", "reference", "ema", "lagged"]
"""Which weights a forward uses: those that train, the initial ones, their average, or the lagged policy."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The transitions of n rows at S stored steps; losses take everything from here and recompute nothing."""

    log_probs: Array
    """[n, S] fp32 of the stored next latents, with gradient; 0 where not valid."""
    means: Array
    """[n, S, ...] fp32, with gradient."""
    std: Array
    """[n, S, 1, ...] fp32 std of the transitions."""
    g: Array
    """[n, S, 1, ...] fp32 diffusion coefficients."""
    next: Array
    """[n, S, ...] fp32.  The stored latents after each step."""
    valid: Array
    """[n, S] bool.  False where a row has fewer steps than others; such entries weigh nothing."""


@dataclass(frozen=True, kw_only=True)
class ReplayedTokens:
    """The tokens of n rows, S the longest text of them; losses take everything from here and recompute nothing."""

    log_probs: Array
    """[n, S] fp32 at the temperature of the rollout, with gradient; 0 where not valid."""
    entropy: Array | None
    """[n, S] fp32 in nats, of the distribution that each token was drawn from, with gradient; 0 where not valid."""
    valid: Array
    """[n, S] bool. False past the end of a text, and for tokens that are not trained on."""
    divergence: Array | None = None
    """[n, S] fp32 in nats, between the distributions that a token was drawn from and a teacher's, with gradient; 0
    where not valid. Only of `Forward.divergence`."""


class Forward(Protocol):
    """The policy as a loss uses it: a replay, the velocity at any point, and decoding.

    With gradient for the policy `live`, unless in no_grad; without for every other policy. Ranks that train together
    must ask equally often, with equally many columns of points.
    """

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        """Recompute the stored transitions of a latent track, or the log-probs of a text track's tokens."""
        ...

    def velocity(self, track: Track, x: Array, sigma: Array, *, policy: Policy = "live", guided: bool = False) -> Array:
        """Velocity x1 - x0 at any points, under the track's conditions. Returns fp32 in the shape of x.

        x: [n, ...] with sigma [n], or [n, k, ...] with sigma [n, k]: k points of each of the n rows.
        guided: with the guidance that the track was sampled with; without it the positive conditions alone.
        Raises BatchError for a track that is not latent, and for shapes that do not fit its rows.
        """
        ...

    def divergence(
        self,
        track: Track,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        top_k: int | None = None,
        policy: Policy = "reference",
    ) -> ReplayedTokens:
        """Divergence of the live policy from another one over the whole vocabulary, at each token of a text track.

        kind, beta, top_k: see `TextModel.divergence`.  policy: the teacher.
        Returns log-probs without gradient, and no entropy. Raises BatchError for a track that is not text, for models
        that are not compared, and where only the teacher's log-probs of the sampled tokens are available.
        """
        ...

    def decode(self, track: Track, latents: Array) -> Array:
        """Media of clean latents [n, ...] of the track's rows, as `DiffusionModel.decode` gives them.

        Keeps the gradient with respect to the latents. Raises BatchError for a track that is not latent.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of a loss on one micro-batch."""

    name: str
    """Terms of equal name share a total."""
    values: Array
    """[n, ...] per element, with gradient."""
    weights: Array
    """[n, ...] >= 0, same shape.  An element of weight 0 contributes nothing, whatever its value."""
    scale: float = 1.0
    """Factor of the term in the loss."""
    normalizer: Array | None = None
    """>= 0, of any shape. What the term adds to its total; its weights if None. For means over something else than
    elements, such as a sum over tokens and a mean over sequences."""

    def __post_init__(self) -> None:
        if self.values.shape != self.weights.shape:
            raise ValueError(
                f"loss term '{self.name}': values have shape {list(self.values.shape)}, weights "
                f"{list(self.weights.shape)}. Expand the weights, so that it is plain what each element "
                "weighs."
            )


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that adds up over micro-batches and ranks.

    `total` and `weight` are numbers, or tensors of one element: those of all micro-batches of an update are read in one
    transfer, while `float` of a tensor makes the host wait for the device at every micro-batch.
    """

    total: float | Array
    weight: float | Array = 1.0
    reduce: Literal["mean", "max", "sum"] = "mean"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Loss terms and metrics of one micro-batch."""

    terms: Sequence[LossTerm]
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict[str, Metric]())


class Algorithm(Protocol):
    """Requirements on a rollout, advantages, and loss terms over it.

    Build: `build(config, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float], train: TrainConfig,
    seed: int)`; seed: of the run, for noise that a loss draws. One that needs differentiable rewards also takes
    `score: GradientScore | None`, built where training runs; None where no loss is computed.

    Inherit the role: the methods of an algorithm with a ratio, a state or a critic have defaults.

    State: anything besides the weights that an algorithm carries from step to step, such as a coefficient. The process
    that drives the run holds it; where others train, the mapping of `state` goes to their copies with each call of
    train. `end_step` is therefore the one place where the state may change.

    Critic, of an algorithm with `trains_critic`: a second network, trained by the backend as well, which predicts
    the reward still to come before each action of a sample. Actions are the tokens of a text, or the scored steps of a
    trajectory (`LatentSegment.scored_steps`). Engines never see it. After the old-log-prob pass, and before the first
    update, `segment.values` has its predictions; then `after_anchor` is called, once. The terms of `loss` train the
    policy alone, those of `critic_loss` the critic alone, each with its own optimizer.
    """

    trains_critic: bool = False
    """Whether its advantages come from a critic. Its spec then says `Needs(critic=True)`."""

    separates_steps: bool = False
    """Whether its losses over latents are sums over the steps, or drawn points, of a sample. Each can then be replayed,
    differentiated and freed alone, see `pieces`."""

    @abstractmethod
    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track with its advantages, and numbers for the log. Reads `rewards` and `reward_parts`, with the
        weights of `Track.reward_weights` before those it was built with.

        May return fewer rows, such as the best and the worst of each group, and sets `unit_ids` if rows stay together.
        """

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Freeze what the updates compare with (old log-probs, old means), before the first update. Inherited by an
        algorithm whose loss has no ratio: the track as it is.

        Called once per micro-batch, at the very geometry of the updates, without gradient.
        """
        return track

    @abstractmethod
    def loss_weights(self, track: Track) -> Mapping[str, Array]:
        """Weights of each term for these rows, without any forward: name -> [n, ...].

        The stack sums them over all micro-batches and ranks before the first backward; a term is divided by its sum.
        """

    @abstractmethod
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        """Loss terms of one micro-batch. `progress` rises from 0 to 1 over the run."""

    def pieces(self, track: Track) -> Sequence[Track]:
        """A micro-batch of latents in parts of one step, or one drawn point, of every row: the terms and weights of
        `loss`, `loss_weights`, `critic_loss` and `critic_weights` for these parts add up to those of the whole.

        Called after the old-log-prob pass, if `separates_steps`. Equally many on every rank, in the same order.
        """
        raise absent("algorithm", self, "pieces", "with `separates_steps`")

    def end_step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Move the state to that of the next step; returns numbers for the log of this one.

        metrics: of its stage in the whole step, over all micro-batches, updates and ranks, and `samples`, the number
        of them. Those of updates are missing in a step without any.
        """
        return {}

    def state(self) -> Mapping[str, Any]:
        """The state for the next step, as plain JSON: numbers, texts, truth values, None, and lists and mappings of
        them.

        Empty where these settings need none. The mapping is kept, so the algorithm must not change it later.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave. Raises ValueError, before anything changes, for what it cannot have
        given."""
        raise ValueError(f"{type(self).__name__} keeps no state, got {', '.join(sorted(state)) or 'an empty one'}.")

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Array], Array]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """Turn rewards and values into the advantages and returns of actions, and give numbers for the log.

        track: all rows that this rank trains on, over all micro-batches and updates; rows of weight 0 count nowhere.
        sum_over_ranks: of fp64 on the CPU; collective, so every rank calls it equally often, whatever its rows are.
        """
        raise absent("algorithm", self, "after_anchor", "with `trains_critic`")

    def critic_weights(self, track: Track) -> Mapping[str, Array]:
        """Weights of the terms of `critic_loss`, as `loss_weights` gives those of `loss`: name -> [n, ...]."""
        raise absent("algorithm", self, "critic_weights", "with `trains_critic`")

    def critic_loss(self, track: Track, values: Array, *, progress: float) -> Losses:
        """Loss terms of one micro-batch for the critic.

        values: [n, S] fp32 with gradient, its predictions now, S the most actions of any row; 0 where there is none.
        """
        raise absent("algorithm", self, "critic_loss", "with `trains_critic`")


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
    reference: Model | None = None
    """A frozen model that answers for the policy `reference`; None is the initial weights."""
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
