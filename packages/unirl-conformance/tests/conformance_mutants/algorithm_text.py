"""Algorithms over tokens that are broken in one way each."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.plugin import SPECS
from unirl.core.roles import Forward, Losses, LossTerm
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.spec import AlgorithmSpec, Gap
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.replay import per_token

from conformance_mutants.mutant import mutant, mutants_in

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


REFERENCE = "the-loss-agrees-with-its-numpy-reference"
AGE, MICRO = "stale-samples-are-weighted-as-declared", "micro-batches-do-not-change-the-gradient"
SURROGATE, ZERO = "three-updates-raise-the-surrogate", "zero-advantages-give-no-gradient"
FAVOURS, LEARNS = "a-step-favours-samples-with-advantage", "training-on-text-raises-the-reward"
NEEDS, PADDING = "only-declared-needs-are-read", "padding-changes-nothing"


# Of samples with a ratio the hundredth is added after it.
@mutant(claim=ZERO, breaks="adds a hundredth to the advantages of texts", also=(AGE,))
class LikesItsTexts(Grpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, 1.0, 0.01), forward, progress=progress)


# The same thing over three updates, and over a run.
@mutant(claim=FAVOURS, breaks="has a sign too many over tokens", also=(SURROGATE, LEARNS))
class NegatesTokenAdvantages(Grpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, -1.0, 0.0), forward, progress=progress)


@mutant(
    claim="the-first-ratio-is-exactly-one",
    breaks="adds a thousandth to the log-probs of tokens that it replays before updates",
)
class ShiftsTheTokenAnchor(Grpo):
    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        track = super().with_old_log_probs(track, forward)
        assert track.text.log_probs is not None
        moved = tuple(values + 1e-3 for values in track.text.log_probs)
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=moved))


# Of the ratio that corrects for age nothing is left.
@mutant(claim=SURROGATE, breaks="has a clip range of 0 over tokens", also=(AGE,))
class ClipsTokensAtOnce(Grpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=1e-9), **context)


@mutant(claim=REFERENCE, breaks="clips tokens at twice the range")
class ClipsTokensLate(Grpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=2 * config.clip_range), **context)


# Rows that fill it up have tokens as well.
@mutant(claim=MICRO, breaks="divides by the tokens of a micro-batch", also=(PADDING,))
class AveragesItsMicroBatch(Grpo):
    """Divides by the tokens of the micro-batch in place of those of the update."""

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return _scaled(super().loss(track, forward, progress=progress), 100 / sum(track.text.total_lengths))


@mutant(claim=PADDING, breaks="takes rows that fill a batch up for texts")
class CountsTokenPadding(Grpo):
    """Takes rows that fill a batch up for texts."""

    def _token_weights(self, track: Track, *, drop_zero_advantage: bool = False) -> Any:
        fills = [status is Status.PADDING for status in track.status]
        weights = track.sample_weights + track.sample_weights.new_tensor(fills)
        status = tuple(
            Status.COMPLETED if is_fill else result for result, is_fill in zip(track.status, fills, strict=True)
        )
        result = dataclasses.replace(track, sample_weights=weights, status=status)
        return super()._token_weights(result, drop_zero_advantage=drop_zero_advantage)


# Those of rows that fill a batch up as well.
@mutant(claim=NEEDS, breaks="reads numbers of tokens that are not trained on", also=(PADDING,))
class ReadsMaskedTokens(Grpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        nothing = 0.0 * per_token(track.text, "log_probs").sum()
        return _scaled(super().loss(track, forward, progress=progress), 1.0 + nothing)


@mutant(claim=NEEDS, breaks="weighs texts by the length of their prompts")
class ReadsWords(Grpo):
    """Weighs texts by the words of their prompts."""

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        factor = torch.tensor([1.0 + len(prompt) for prompt in track.inputs.prompts])[:, None]
        return _scaled(super().loss(track, forward, progress=progress), factor.to(track.sample_weights.device))


@mutant(claim=LEARNS, breaks="learns backwards after a tenth of the run")
class LearnsBackwards(Grpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        sign = -1.0 if progress > 0.1 else 1.0
        return _scaled(super().loss(track, forward, progress=progress), sign)


@mutant(claim=AGE, breaks="compares tokens with replayed log-probs where those of the engine are asked for")
class ReplaysTokensAnyway(Grpo):
    def __init__(self, config: Any, *, train: TrainConfig, **context: Any) -> None:
        super().__init__(config, train=dataclasses.replace(train, old_log_probs="replay"), **context)


BROKEN = mutants_in(__name__)
OTHER_LOSS = (
    LikesItsTexts,
    NegatesTokenAdvantages,
    ClipsTokensAtOnce,
    AveragesItsMicroBatch,
    ReadsWords,
    LearnsBackwards,
)
"""Their loss is no longer the paper's, so they declare that as a gap."""


def build(config: Any, *, seed: int, **context: Any) -> Grpo:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, **context)


def specs() -> list[AlgorithmSpec]:
    return [_spec(kind) for kind in BROKEN]


def _spec(kind: type[Grpo]) -> AlgorithmSpec:
    spec = dataclasses.replace(GRPO, name=BROKEN[kind].name, build=f"{__name__}:build", when={})
    if kind in OTHER_LOSS:
        return dataclasses.replace(spec, gaps=(Gap(claim=REFERENCE, reason=BROKEN[kind].breaks),))
    return spec


def _with_advantages(track: Track, factor: float, offset: float) -> Track:
    assert track.advantages is not None
    return dataclasses.replace(track, advantages=factor * track.advantages + offset)


def _scaled(losses: Losses, factor: Any) -> Losses:
    """The losses with other values of the policy's term, which comes first."""
    first, *others = [cast(LossTerm, term) for term in losses.terms]
    return dataclasses.replace(losses, terms=[dataclasses.replace(first, values=first.values * factor), *others])
