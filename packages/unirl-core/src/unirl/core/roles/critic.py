"""Critics: what an algorithm with one adds to its role, and a backend that keeps one to its own.

A critic is a second network that the backend trains along: before each action of a sample it says what reward is still
to come. Actions are the tokens of a text, or the scored steps of a trajectory (`LatentSegment.scored_steps`). It stays
where training is; engines never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..types.array import Array
from .training import Algorithm, Backend, Losses, Metric

if TYPE_CHECKING:
    from ..types.track import Track

__all__ = ["CriticAlgorithm", "CriticBackend"]


@runtime_checkable
class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm whose advantages come from a critic. Its spec says `Needs(critic=True)`.

    After the old-log-prob pass, and before the first update, `segment.values` has what the critic expects; then
    `after_anchor` is called, once. The terms of `loss` train the policy alone, those of `critic_loss` the critic alone,
    each with an optimizer of its own.
    """

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Array], Array]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """Turn rewards and values into the advantages and returns of actions, and give numbers for the log.

        track: all rows that this rank trains on, over all micro-batches and updates; rows of weight 0 count nowhere.
        sum_over_ranks: of fp64 on the CPU; collective, so every rank calls it equally often, whatever its rows are.
        """
        ...

    def critic_weights(self, track: Track) -> Mapping[str, Array]:
        """What `weights` is for `loss`: the weights of the terms of `critic_loss`, name -> [n, ...]."""
        ...

    def critic_loss(self, track: Track, values: Array, *, progress: float) -> Losses:
        """Loss terms of one micro-batch for the critic.

        values: [n, S] fp32 with gradient, what it expects now, S the most actions of any row; 0 where there is none.
        """
        ...


class CriticBackend(Backend, Protocol):
    """A backend that keeps a critic, where its settings ask for one (`Cap.CRITIC`)."""

    def with_values(self, track: Track) -> Track:
        """The track with what the critic expects before each action, as `segment.values`. No gradient. Collective.

        Raises RecipeError where it keeps none.
        """
        ...
