"""Algorithms that are broken in one way each, next to the one that is well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import unirl.backends.fsdp2.plugin
import unirl.engines.trainside.plugin
import unirl.models.sd3.plugin
import unirl.rewards.rules.plugin
from torch import Tensor
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.plugin import FLOW_GRPO
from unirl.core.limits import Reason
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Forward, Losses, LossTerm
from unirl.core.specs.capability import Needs
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.plan import Plan
from unirl.core.specs.spec import AlgorithmSpec, Gap
from unirl.core.types.track import Track

from conformance_mutants import algorithm_critic, algorithm_gradient, algorithm_state, algorithm_text
from conformance_mutants.mutant import mutant, mutants_in

REFERENCE = "the-loss-agrees-with-its-numpy-reference"
AGE = "stale-samples-are-weighted-as-declared"
MICRO = "micro-batches-do-not-change-the-gradient"


# What is added counts by the age of the sample as well.
@mutant(claim="zero-advantages-give-no-gradient", breaks="adds 0.01 to every advantage", also=(AGE,))
class LikesItsSamples(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, lambda found: found + 0.01), forward, progress=progress)


@mutant(claim="a-step-favours-samples-with-advantage", breaks="has a sign too many")
class NegatesAdvantages(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(_with_advantages(track, lambda found: -found), forward, progress=progress)


@mutant(
    claim="the-first-ratio-is-exactly-one", breaks="adds a thousandth to the log-probs that it replays before updates"
)
class ShiftsTheAnchor(FlowGrpo):
    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        track = super().with_old_log_probs(track, forward)
        assert track.latent.log_probs is not None
        return dataclasses.replace(
            track, segment=dataclasses.replace(track.latent, log_probs=track.latent.log_probs + 1e-3)
        )


# Of the ratio that corrects for age nothing is left.
@mutant(claim="three-updates-lower-the-loss", breaks="has a clip range of 0", also=(AGE,))
class ClipsAtOnce(FlowGrpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=0.0), **context)


@mutant(claim=REFERENCE, breaks="clips at twice the range")
class ClipsLate(FlowGrpo):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, clip_range=2 * config.clip_range), **context)


@mutant(claim=REFERENCE, breaks="names no reference")
class WithoutReference(FlowGrpo):
    pass


# The ratio of one sample must not move the weight of another.
@mutant(claim=MICRO, breaks="divides by the mean advantage of the micro-batch", also=(AGE,))
class ScalesByTheMicroBatch(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        sizes = torch.where(track.sample_weights > 0, _advantages(track).abs(), 0.0)
        scale = 0.1 + sizes.sum() / (track.sample_weights > 0).sum()
        return _with_values(super().loss(track, forward, progress=progress), lambda values: values / scale)


# A row of a micro-batch of one is always the first.
@mutant(claim="the-order-of-the-rows-does-not-change-the-gradient", breaks="weighs later rows more", also=(MICRO,))
class WeighsByPlace(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        place = 1 + 0.1 * torch.arange(track.num_rows, device=track.sample_weights.device)
        return _with_values(super().loss(track, forward, progress=progress), lambda values: values * place[:, None])


@mutant(claim="padding-changes-nothing", breaks="gives every row weight 1")
class CountsPadding(FlowGrpo):
    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return super().loss_weights(dataclasses.replace(track, sample_weights=torch.ones_like(track.sample_weights)))


@mutant(claim="only-declared-needs-are-read", breaks="reads rewards after the advantages")
class ReadsRewards(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        assert track.rewards is not None
        nothing = 0.0 * track.rewards[:, None]
        return _with_values(super().loss(track, forward, progress=progress), lambda values: values + nothing)


@mutant(claim="only-declared-needs-are-read", breaks="runs a policy that it does not name")
class RunsTheReference(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        forward(track, policy="reference")
        return super().loss(track, forward, progress=progress)


@mutant(claim="weights-announce-what-the-loss-weighs", breaks="announces weight 1 for samples that weigh a half")
class AnnouncesWholeWeights(FlowGrpo):
    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return super().loss_weights(dataclasses.replace(track, sample_weights=(track.sample_weights > 0).float()))

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        losses, weights = super().loss(track, forward, progress=progress), super().loss_weights(track)
        terms = [dataclasses.replace(term, weights=weights[term.name]) for term in _terms(losses)]
        return dataclasses.replace(losses, terms=terms)


@mutant(
    claim="advantages-do-not-depend-on-the-order-of-the-rows", breaks="scales the advantages of groups that come later"
)
class RanksGroups(FlowGrpo):
    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        groups = list(dict.fromkeys(track.group_ids))
        factors = torch.tensor([1 + 0.1 * groups.index(group) for group in track.group_ids])
        result, metrics = super().advantages(track)
        return _with_advantages(result, lambda values: values * factors), metrics


@mutant(claim="advantages-are-centred-in-their-group", breaks="takes the mean of the batch")
class CentresOnTheBatch(FlowGrpo):
    def __init__(self, config: Any, *, advantage: Any, **context: Any) -> None:
        super().__init__(config, advantage=dataclasses.replace(advantage, center="global", scope="global"), **context)


@mutant(claim="a-higher-reward-gives-a-higher-advantage", breaks="negates advantages")
class PrefersTheWorse(FlowGrpo):
    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        result, metrics = super().advantages(track)
        return _with_advantages(result, torch.neg), metrics


@mutant(claim="advantages-are-finite-for-every-shape-of-group", breaks="gives a group of one NaN")
class NeedsTwo(FlowGrpo):
    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        result, metrics = super().advantages(track)
        counted = [group for group, weight in zip(track.group_ids, track.sample_weights, strict=True) if weight]
        alone = torch.tensor([counted.count(group) == 1 for group in track.group_ids])
        return _with_advantages(result, lambda values: values.masked_fill(alone, math.nan)), metrics


@mutant(claim="training-raises-the-reward", breaks="learns backwards after a tenth of the run")
class TurnsRound(FlowGrpo):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        sign = -1.0 if progress > 0.1 else 1.0
        return _with_values(super().loss(track, forward, progress=progress), lambda values: sign * values)


@mutant(claim=AGE, breaks="compares with replayed log-probs where those of the engine are asked for")
class ReplaysAnyway(FlowGrpo):
    def __init__(self, config: Any, *, train: TrainConfig, **context: Any) -> None:
        super().__init__(config, train=dataclasses.replace(train, old_log_probs="replay"), **context)


@mutant(claim=AGE, breaks="states that it corrects for age where it compares replayed means")
class RatioOfMeans(FlowGrpo):
    pass


@mutant(claim=AGE, breaks="takes a ratio to the policy that sampled, and states that it takes none")
class WhoeverSampled(FlowGrpo):
    pass


class TrainsOnPairs(FlowGrpo):
    """Well, and keeps neighbours in a group together."""

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        result, metrics = super().advantages(track)
        places = {row: place for rows in track.groups().values() for place, row in enumerate(rows)}
        units = tuple(f"{group}/{places[row] // 2}" for row, group in enumerate(track.group_ids))
        return dataclasses.replace(result, unit_ids=units), metrics


BROKEN = mutants_in(__name__)
FURTHER = (algorithm_text, algorithm_state, algorithm_critic, algorithm_gradient)
MUTANTS = [*BROKEN.values(), *(mutant for module in FURTHER for mutant in module.BROKEN.values())]
OTHER_LOSS = (
    LikesItsSamples,
    NegatesAdvantages,
    ClipsAtOnce,
    ScalesByTheMicroBatch,
    WeighsByPlace,
    CountsPadding,
    TurnsRound,
)
"""Their loss is no longer the paper's, so they declare that as a gap."""
WELL = (
    FLOW_GRPO,
    dataclasses.replace(
        FLOW_GRPO, name="guard", trial={"ratio_norm": True, "step_weight": "inverse-dt", "clip_schedule": "cosine"}
    ),
    dataclasses.replace(
        FLOW_GRPO,
        name="other-settings",
        trial={
            "step_weight": "noise",
            "clip_schedule": "linear",
            "clip_range_high": 0.08,
            "dual_clip": 1.1,
            "drop_zero_advantage": True,
            "kl_form": "flow-grpo-code",
        },
    ),
    dataclasses.replace(FLOW_GRPO, name="pairs", build=f"{__name__}:build_pairs", when={}),
)


def build(config: Any, *, seed: int, **context: Any) -> FlowGrpo:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, **context)


def build_pairs(config: Any, *, seed: int, **context: Any) -> TrainsOnPairs:
    return TrainsOnPairs(config, **context)


def catalog() -> Catalog:
    quickstart = (
        unirl.models.sd3.plugin,
        unirl.engines.trainside.plugin,
        unirl.backends.fsdp2.plugin,
        unirl.rewards.rules.plugin,
    )
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_algorithms=hookimpl(
                    lambda: [*WELL, *algorithm_text.WELL, *algorithm_critic.WELL, *algorithm_gradient.WELL]
                )
            ),
            "unirl-mutants": SimpleNamespace(
                unirl_algorithms=hookimpl(
                    lambda: [
                        *(_spec(kind) for kind in BROKEN),
                        *(spec for module in FURTHER for spec in module.specs()),
                    ]
                ),
                unirl_check_plan=_check_plan,
            ),
            **{module.__name__: module for module in quickstart},
        }
    )


def _spec(kind: type[FlowGrpo]) -> AlgorithmSpec:
    # What is broken does not hang on a setting that needs more, so it is tried without; those that are well with each.
    spec = dataclasses.replace(FLOW_GRPO, name=BROKEN[kind].name, build=f"{__name__}:build", when={})
    if kind is WithoutReference:
        return dataclasses.replace(spec, reference="")
    if kind is RatioOfMeans:
        return dataclasses.replace(spec, when={"ratio_norm": Needs(staleness="ratio")})
    if kind is WhoeverSampled:
        return dataclasses.replace(spec, needs=dataclasses.replace(spec.needs, staleness="any"))
    if kind in OTHER_LOSS:
        return dataclasses.replace(spec, gaps=(Gap(claim=REFERENCE, reason=BROKEN[kind].breaks),))
    return spec


@hookimpl
def _check_plan(plan: Plan) -> list[Reason]:
    """Real runs take a quarter of a minute each; one is enough to see that the claim about them can fail."""
    if plan.only.algorithm.name == BROKEN[TurnsRound].name:
        return []
    return [Reason(key="algorithm", text=f"{plan.only.algorithm.name!r} is tried on the workbench model alone.")]


def _terms(losses: Losses) -> list[LossTerm]:
    return list(losses.terms)


def _advantages(track: Track) -> Tensor:
    assert track.advantages is not None
    return track.advantages


def _with_advantages(track: Track, change: Callable[[Tensor], Tensor]) -> Track:
    return dataclasses.replace(track, advantages=change(_advantages(track)))


def _with_values(losses: Losses, change: Callable[[Tensor], Tensor]) -> Losses:
    """The losses with other values of the policy's term, which comes first."""
    first, *others = _terms(losses)
    return dataclasses.replace(losses, terms=[dataclasses.replace(first, values=change(first.values)), *others])
