"""Algorithms: advantages, and loss terms over a track."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..types.array import Array
from .absent import absent

if TYPE_CHECKING:
    from ..types.track import Track
    from .forward import Forward

__all__ = ["Algorithm", "LossTerm", "Losses", "Metric"]


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

    Fake score, of an algorithm with `trains_fake_score`: a second copy of the weights that train, which starts as they
    do and learns the velocity of the policy's own samples (distribution matching distillation, arXiv 2311.18828). The
    losses of both ask for it as the policy `fake`; the terms of `fake_score_loss` train it alone, with its own
    optimizer, before each update of the policy. Engines never see it.
    """

    trains_critic: bool = False
    """Whether its advantages come from a critic. Its spec then says `Needs(critic=True)`."""

    trains_fake_score: bool = False
    """Whether it trains a fake score. Its spec then says `Needs(fake_score=True)`."""

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
        `loss` and `loss_weights` for these parts add up to those of the whole, and so do those of a critic or fake
        score.

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

    def fake_score_weights(self, track: Track) -> Mapping[str, Array]:
        """Weights of the terms of `fake_score_loss`, as `loss_weights` gives those of `loss`: name -> [n, ...]."""
        raise absent("algorithm", self, "fake_score_weights", "with `trains_fake_score`")

    def fake_score_loss(self, track: Track, forward: Forward, *, progress: float, repeat: int) -> Losses:
        """Loss terms of one micro-batch for the fake score; only the policy `fake` has a gradient.

        repeat: which of the fake score's steps before this update of the policy it is, from 0; each draws other noise.
        """
        raise absent("algorithm", self, "fake_score_loss", "with `trains_fake_score`")
