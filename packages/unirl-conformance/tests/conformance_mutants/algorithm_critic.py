"""Algorithms that do one thing wrong with their critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor
from unirl.algorithms.ppo.algorithm import Ppo
from unirl.algorithms.ppo.plugin import SPEC
from unirl.core.roles import Forward, Losses, LossTerm, Metric
from unirl.core.specs.spec import AlgorithmSpec
from unirl.core.types.track import Track
from unirl.numerics.tokens.replay import per_sample, per_token, token_mask
from unirl.numerics.tokens.whitening import whiten

from conformance_mutants.mutant import mutant, mutants_in

__all__ = ["BROKEN", "WELL", "specs"]

WELL = (dataclasses.replace(SPEC, name="judged", trial={"gamma": 0.9, "kl_estimator": "k3"}),)


REFERENCE = "the-loss-agrees-with-its-numpy-reference"


@mutant(claim=REFERENCE, breaks="teaches its critic returns without the discount")
class DiscountsNothing(Ppo):
    """With gamma in the advantages of tokens, and not in what the critic is to expect."""

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        result, metrics = super().after_anchor(track, sum_over_ranks)
        config, self._config = self._config, dataclasses.replace(self._config, gamma=1.0)
        plain, _ = super().after_anchor(track, sum_over_ranks)
        self._config = config
        return dataclasses.replace(
            result, segment=dataclasses.replace(result.text, returns=plain.text.returns)
        ), metrics


@mutant(claim=REFERENCE, breaks="takes the values that a critic's clip is about after the update")
class ClipsAboutTheNewValue(Ppo):
    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        now = dataclasses.replace(track.text, values=per_sample(values.detach(), track.text))
        return super().critic_loss(dataclasses.replace(track, segment=now), values, progress=progress)


# The ratio of one sample must not move the weight of another.
@mutant(
    claim="micro-batches-do-not-change-the-gradient",
    breaks="whitens the advantages of tokens over a micro-batch",
    also=("stale-samples-are-weighted-as-declared",),
)
class WhitensItsMicroBatch(Ppo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        counted = token_mask(track.text) & (track.sample_weights > 0)[:, None]
        own = per_sample(whiten(per_token(track.text, "advantages"), counted), track.text)
        own_track = dataclasses.replace(track, segment=dataclasses.replace(track.text, advantages=own))
        return super().loss(own_track, forward, progress=progress)


@mutant(
    claim="ranks-make-the-advantages-of-tokens-together",
    breaks="whitens the advantages of tokens over the texts of its rank",
)
class WhitensItsRank(Ppo):
    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        return super().after_anchor(track, lambda values: values)


# Advantages are soon what the critic says, not the reward.
@mutant(
    claim="three-updates-lower-the-loss-of-the-critic",
    breaks="has a sign too many in the gradient of its critic",
    also=("training-on-text-raises-the-reward",),
)
class LearnsAwayFromReturns(Ppo):
    """The loss of its critic is right, the gradient has a sign too many."""

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        losses = super().critic_loss(track, values, progress=progress)
        term = cast(LossTerm, losses.terms[0])
        turned = 2 * term.values.detach() - term.values
        return dataclasses.replace(losses, terms=[dataclasses.replace(term, values=turned)])


BROKEN = mutants_in(__name__)


def build(config: Any, **context: Any) -> Ppo:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, train=context["train"])


def specs() -> list[AlgorithmSpec]:
    return [_spec(kind) for kind in BROKEN]


def _spec(kind: type[Ppo]) -> AlgorithmSpec:
    spec = dataclasses.replace(SPEC, name=BROKEN[kind].name, build=f"{__name__}:build", when={})
    return dataclasses.replace(spec, trial={"gamma": 0.9}) if kind is DiscountsNothing else spec
