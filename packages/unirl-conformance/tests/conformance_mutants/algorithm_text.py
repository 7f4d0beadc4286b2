"""Algorithms over tokens that are broken in one way each."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.plugin import SPECS
from unirl.core.config import TrainConfig
from unirl.core.roles import Losses, Replay
from unirl.core.spec import AlgorithmSpec, Gap
from unirl.core.track import Status, Track
from unirl.numerics.reduction import LossTerm
from unirl.numerics.text_replay import per_token

from conformance_mutants.mutant import Mutant

GRPO = SPECS[0]
WELL: tuple[AlgorithmSpec, ...] = (
    # One is enough here; `unirl conformance` holds all that are installed to the same claims.
    GRPO,
    dataclasses.replace(
        GRPO,
        name="token-settings",
        trial={
            "clip_range_high": 0.08,
            "dual_clip": 1.5,
            "aggregation": "token-mean",
            "kl_estimator": "k2",
            "kl_straight_through": True,
        },
    ),
)


class LikesItsTexts(Grpo):
    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, 1.0, 0.01), replay, progress=progress)


class NegatesTokenAdvantages(Grpo):
    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, -1.0, 0.0), replay, progress=progress)


class ShiftsTheTokenAnchor(Grpo):
    def anchor(self, track: Track, replay: Replay) -> Track:
        track = super().anchor(track, replay)
        assert track.text.log_probs is not None
        moved = tuple(values + 1e-3 for values in track.text.log_probs)
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=moved))


class ClipsTokensAtOnce(Grpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=1e-9), **context)


class ClipsTokensLate(Grpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=2 * config.clip_range), **context)


class AveragesItsMicroBatch(Grpo):
    """Divides by the tokens of the micro-batch in place of those of the update."""

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        return _scaled(super().loss(track, replay, progress=progress), 100 / sum(track.text.total_lengths))


class CountsTokenPadding(Grpo):
    """Takes rows that fill a batch up for texts."""

    def _token_weights(self, track: Track, *, drop_zero_advantage: bool = False) -> Any:
        fills = [status is Status.PADDING for status in track.status]
        weights = track.weights + track.weights.new_tensor(fills)
        status = tuple(
            Status.COMPLETED if is_fill else found for found, is_fill in zip(track.status, fills, strict=True)
        )
        found = dataclasses.replace(track, weights=weights, status=status)
        return super()._token_weights(found, drop_zero_advantage=drop_zero_advantage)


class ReadsMaskedTokens(Grpo):
    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        nothing = 0.0 * per_token(track.text, "log_probs").sum()
        return _scaled(super().loss(track, replay, progress=progress), 1.0 + nothing)


class ReadsWords(Grpo):
    """Weighs texts by the words of their prompts."""

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        factor = torch.tensor([1.0 + len(prompt) for prompt in track.prompts])[:, None]
        return _scaled(super().loss(track, replay, progress=progress), factor.to(track.weights.device))


class LearnsBackwards(Grpo):
    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        sign = -1.0 if progress > 0.1 else 1.0
        return _scaled(super().loss(track, replay, progress=progress), sign)


class ReplaysTokensAnyway(Grpo):
    def __init__(self, config: Any, *, train: TrainConfig, **context: Any) -> None:
        super().__init__(config, train=dataclasses.replace(train, old_log_probs="replay"), **context)


REFERENCE = "the-loss-agrees-with-its-numpy-reference"
AGE, MICRO = "samples-of-older-weights-count-as-declared", "micro-batches-do-not-change-the-gradient"
SURROGATE, ZERO = "three-updates-raise-the-surrogate", "zero-advantages-give-no-gradient"
FAVOURS, LEARNS = "a-step-favours-samples-with-advantage", "training-on-text-raises-the-reward"
NEEDS, PADDING = "only-declared-needs-are-read", "padding-changes-nothing"
BROKEN: dict[type[Grpo], Mutant] = {
    LikesItsTexts: Mutant(
        claim=ZERO,
        name="likes-its-texts",
        broken="adds a hundredth to the advantages of texts",
        # Of samples with a ratio the hundredth is added after it.
        also=(AGE,),
    ),
    NegatesTokenAdvantages: Mutant(
        claim=FAVOURS,
        name="negates-token-advantages",
        broken="has a sign too many over tokens",
        # The same thing over three updates, and over a run.
        also=(SURROGATE, LEARNS),
    ),
    ShiftsTheTokenAnchor: Mutant(
        claim="the-first-ratio-is-exactly-one",
        name="shifts-the-token-anchor",
        broken="adds a thousandth to the log-probs of tokens that it replays before updates",
    ),
    ClipsTokensAtOnce: Mutant(
        claim=SURROGATE,
        name="clips-tokens-at-once",
        broken="has a clip range of 0 over tokens",
        # Of the ratio that corrects for age nothing is left.
        also=(AGE,),
    ),
    ClipsTokensLate: Mutant(claim=REFERENCE, name="clips-tokens-late", broken="clips tokens at twice the range"),
    AveragesItsMicroBatch: Mutant(
        claim=MICRO,
        name="averages-its-micro-batch",
        broken="divides by the tokens of a micro-batch",
        # Rows that fill it up have tokens as well.
        also=(PADDING,),
    ),
    CountsTokenPadding: Mutant(
        claim=PADDING, name="counts-token-padding", broken="takes rows that fill a batch up for texts"
    ),
    ReadsMaskedTokens: Mutant(
        claim=NEEDS,
        name="reads-masked-tokens",
        broken="reads numbers of tokens that are not trained on",
        # Those of rows that fill a batch up as well.
        also=(PADDING,),
    ),
    ReadsWords: Mutant(claim=NEEDS, name="reads-words", broken="weighs texts by the length of their prompts"),
    LearnsBackwards: Mutant(claim=LEARNS, name="learns-backwards", broken="learns backwards after a tenth of the run"),
    ReplaysTokensAnyway: Mutant(
        claim=AGE,
        name="replays-tokens-anyway",
        broken="compares tokens with replayed log-probs where those of the engine are asked for",
    ),
}
OTHER_LOSS = (
    LikesItsTexts,
    NegatesTokenAdvantages,
    ClipsTokensAtOnce,
    AveragesItsMicroBatch,
    ReadsWords,
    LearnsBackwards,
)
"""Their loss is no longer the paper's, so they declare that as a gap."""


def build(config: Any, **context: Any) -> Grpo:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, **context)


def specs() -> list[AlgorithmSpec]:
    return [_spec(kind) for kind in BROKEN]


def _spec(kind: type[Grpo]) -> AlgorithmSpec:
    spec = dataclasses.replace(GRPO, name=BROKEN[kind].name, build=f"{__name__}:build", when={})
    if kind in OTHER_LOSS:
        return dataclasses.replace(spec, gaps=(Gap(claim=REFERENCE, reason=BROKEN[kind].broken),))
    return spec


def _with_advantages(track: Track, factor: float, offset: float) -> Track:
    assert track.advantages is not None
    return dataclasses.replace(track, advantages=factor * track.advantages + offset)


def _scaled(losses: Losses, factor: Any) -> Losses:
    """The losses with other values of the policy's term, which comes first."""
    first, *others = [cast(LossTerm, term) for term in losses.terms]
    return dataclasses.replace(losses, terms=[dataclasses.replace(first, values=first.values * factor), *others])
