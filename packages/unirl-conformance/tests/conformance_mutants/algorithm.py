"""Algorithms with one fault each, next to healthy ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import unirl.backends.fsdp2.plugin
import unirl.engines.trainside.plugin
import unirl.models.sd3.plugin
import unirl.rewards.rules.plugin
from torch import Tensor
from unirl.algorithms.crd.plugin import CRD
from unirl.algorithms.dgpo.plugin import DGPO
from unirl.algorithms.distillation.plugin import DMD2
from unirl.algorithms.draft.plugin import DRAFT
from unirl.algorithms.epg.plugin import EPG
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.algorithm import build as build_flow_grpo
from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
from unirl.algorithms.flow_grpo.plugin import FLOW_GRPO
from unirl.core.limits import Reason
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Forward, Losses
from unirl.core.specs.capability import Needs
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.track import Track

from conformance_mutants import algorithm_text
from conformance_mutants.algorithm_changes import (
    AGE,
    ANCHOR_MOVED,
    FAVOURS,
    MICRO,
    NEEDS,
    PADDING,
    RATIO,
    REFERENCE,
    REPLAYS,
    RESUMED,
    SERIAL,
    TWICE_THE_CLIP,
    ZERO,
    advantages,
    algorithm,
    trains_on,
    turned,
    values,
)
from conformance_mutants.changes import Change, changed, first, loss_with, skipped, takes, then
from conformance_mutants.mutant import builder, catalog_of, plugin, specs


def pairs(_: FlowGrpo, advantages: Any, track: Track) -> tuple[Track, Mapping[str, float]]:
    """Keeps neighbours in a group together."""
    result, metrics = advantages(track)
    places = {row: place for rows in result.groups().values() for place, row in enumerate(rows)}
    units = tuple(f"{group}/{places[row] // 2}" for row, group in enumerate(result.group_ids))
    return replace(result, unit_ids=units), metrics


def by_groups(track: Track) -> Mapping[str, Any]:
    return {"unit_ids": track.group_ids}


def whole_groups(track: Track) -> Track:
    return replace(track, **by_groups(track))


def build_pairs(config: Any, **context: Any) -> Any:
    return changed(build_flow_grpo(config, **context), {"advantages": pairs})


def among_the_kept(_: FlowGrpo, advantages: Any, track: Track) -> tuple[Track, Mapping[str, float]]:
    return advantages(advantages(track)[0])


def announces(change: Callable[[Tensor], Tensor]) -> dict[str, Change]:
    """Weights as if samples had others. change: gets theirs."""
    return {"loss_weights": takes(lambda track: replace(track, sample_weights=change(track.sample_weights)))}


def divided_by_mean_advantage(track: Track, values: Tensor, _: float) -> Tensor:
    assert track.advantages is not None
    is_counted = track.sample_weights > 0
    return values / (0.1 + torch.where(is_counted, track.advantages.abs(), 0.0).sum() / is_counted.sum())


def by_group(track: Track, values: Tensor) -> Tensor:
    groups = list(dict.fromkeys(track.group_ids))
    return values * torch.tensor([1 + 0.1 * groups.index(group) for group in track.group_ids])


def nan_alone(track: Track, values: Tensor) -> Tensor:
    counted = [group for group, weight in zip(track.group_ids, track.sample_weights, strict=True) if weight]
    return values.masked_fill(torch.tensor([counted.count(group) == 1 for group in track.group_ids]), math.nan)


def weighs_halves(part: FlowGrpo, loss: Any, track: Track, forward: Forward, *, progress: float) -> Losses:
    """Use the weights of the healthy algorithm, which its changed `loss_weights` does not announce."""
    losses, weights = loss(track, forward, progress=progress), FlowGrpo.loss_weights(part, track)
    return replace(losses, terms=[replace(term, weights=weights[term.name]) for term in losses.terms])


def refuses_a_wide_clip(part: Any, *_: Any, **__: Any) -> None:
    if part._config.clip_range == 1:
        raise ValueError("clip_range must be below 1")


def loss_with_last_coefficient(part: Any, loss: Any, track: Track, forward: Forward, *, progress: float) -> Losses:
    current, part._kl_coef = part._kl_coef, part.last
    try:
        return loss(track, forward, progress=progress)
    finally:
        part._kl_coef = current


def remember_coefficient(part: Any, *_: Any) -> None:
    part.last = part._kl_coef


def normalised(score: Any) -> Any:
    def scored(track: Track, media: Tensor) -> Tensor:
        rewards = score(track, media)
        return rewards / rewards.detach().abs().clamp(min=1e-6)

    return scored


@dataclass
class PlainConfig(FlowGrpoConfig):
    """Settings without those that the loop adds tensors for."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        yield from super().problems(plan, stage)
        if self.step_rewards:
            yield Reason(key=".step_rewards", text="got true, expected false.")


PLAIN = replace(FLOW_GRPO, config=f"{__name__}:PlainConfig", when={})
# A mutant is tried without the settings that need more; the healthy ones are tried with each.
flow = partial(algorithm, PLAIN)
stateful = partial(algorithm, FLOW_GRPO)
draft, dmd2 = partial(algorithm, DRAFT), partial(algorithm, DMD2)
crd, dgpo, epg = (partial(algorithm, replace(spec, when={})) for spec in (CRD, DGPO, EPG))

# fmt: off
LATENT = [
    # What is added counts by the age of the sample as well.
    flow("likes-its-samples", ZERO, "adds 0.01 to every advantage", also=(AGE, SERIAL), gap=True,
         changes=trains_on(lambda track: {"advantages": track.advantages + 0.01})),
    flow("negates-advantages", FAVOURS, "has a sign too many", gap=True,
         changes=trains_on(lambda track: {"advantages": -track.advantages})),
    flow("shifts-the-anchor", RATIO, "adds a thousandth to the log-probs that it replays before updates",
         changes=ANCHOR_MOVED),
    flow("halves-its-gradient", REFERENCE, "has half the gradient of its value",
         changes=values(lambda _, values, __: (values + values.detach()) / 2)),
    flow("clips-late", REFERENCE, "clips at twice the range",
         arguments=TWICE_THE_CLIP),
    flow("refuses-in-the-loss", "accepted-settings-give-a-finite-loss", "refuses in its loss what its config accepts",
         also=(SERIAL,), changes={"loss": first(refuses_a_wide_clip)}),
    flow("without-reference", REFERENCE, "names no reference", spec={"reference": ""}),
    # The ratio of one sample must not move the weight of another.
    flow("scales-by-the-micro-batch", MICRO, "divides by the mean advantage of the micro-batch", also=(AGE,), gap=True,
         changes=values(divided_by_mean_advantage)),
    flow("sums-what-it-couples", SERIAL,
         "states that a ratio of whole sequences is a sum over their steps",
         after_build=lambda part: setattr(part, "separates_steps", True)),
    # A row of a micro-batch of one is always the first.
    flow("weighs-by-place", "the-order-of-the-rows-does-not-change-the-gradient", "weighs later rows more",
         also=(MICRO,), gap=True,
         changes=values(lambda track, values, _: values * (1 + 0.1 * torch.arange(len(values)).to(values))[:, None])),
    flow("counts-padding", PADDING, "gives every row weight 1", gap=True,
         changes=announces(torch.ones_like)),
    flow("reads-rewards", NEEDS, "reads rewards after the advantages",
         changes=values(lambda track, values, _: values + 0.0 * track.rewards[:, None])),
    flow("runs-the-reference", NEEDS, "runs a policy that it does not name",
         changes={"loss": first(lambda _, track, forward, **__: forward(track, policy="reference"))}),
    flow("announces-whole-weights", "weights-announce-what-the-loss-weighs",
         "announces weight 1 for samples that weigh a half",
         changes={**announces(lambda weights: (weights > 0).float()), "loss": weighs_halves}),
    flow("ranks-groups", "advantages-do-not-depend-on-the-order-of-the-rows",
         "scales the advantages of groups that come later", changes=advantages(by_group)),
    flow("centres-on-the-batch", "advantages-are-centred-in-their-group", "takes the mean of the batch",
         arguments={"advantage": lambda advantage: replace(advantage, center="global", scope="global")}),
    flow("compares-the-kept", "kept-samples-have-the-advantages-of-their-whole-group",
         "compares the samples that are kept with each other", changes={"advantages": among_the_kept}),
    flow("prefers-the-worse", "a-higher-reward-gives-a-higher-advantage", "negates advantages",
         changes=advantages(lambda _, values: -values)),
    flow("needs-two", "advantages-are-finite-for-every-shape-of-group", "gives a group of one NaN",
         changes=advantages(nan_alone)),
    flow("turns-round", "training-raises-the-reward", "learns backwards after a tenth of the run", gap=True,
         changes=values(turned)),
    flow("replays-anyway", AGE, "compares with replayed log-probs where those of the engine are asked for",
         arguments=REPLAYS),
    flow("ratio-of-means", AGE, "states that it corrects for age where it compares replayed means",
         spec={"when": {"ratio_norm": Needs(staleness="ratio")}}),
    flow("whoever-sampled", AGE, "takes a ratio to the policy that sampled, and states that it takes none",
         spec={"needs": replace(FLOW_GRPO.needs, staleness="any")}),
    stateful("starts-anew", RESUMED, "loads no state", changes={"load_state": skipped}),
    stateful("says-what-it-does-not-use", RESUMED, "takes a coefficient that is not in its state",
             after_build=remember_coefficient,
             changes={"loss": loss_with_last_coefficient, "end_step": then(remember_coefficient)}),
    stateful("keeps-it-quiet", RESUMED, "keeps a state, and its spec names no settings of it", spec={"stateful": {}},
             arguments={"config": lambda config: replace(config, kl_target=0.01) if config.kl_coef else config}),
    crd("fits-twice-the-reward", REFERENCE, "fits implied rewards to rewards twice as high",
        changes=trains_on(lambda track: {"advantages": 2 * track.advantages})),
    dgpo("sums-over-the-group", REFERENCE, "has a margin that grows with the number of samples",
         arguments={"config": lambda config: replace(config, beta=4 * config.beta)}),
    dgpo("keeps-pairs-together", MICRO, "compares whole groups, and lets micro-batches split them", gap=True,
         changes={"advantages": pairs, **trains_on(by_groups), "loss_weights": takes(whole_groups)}),
    # At a scale at which the penalty shows.
    epg("drops-the-penalty", REFERENCE, "leaves out the divergence from the policy that sampled",
        spec={"trial": {"elbo_scale": 100.0}},
        arguments={"config": lambda config: replace(config, form="epg")}),
    dmd2("doubles-its-own-score", REFERENCE, "compares the teacher with twice the velocity of the fake score",
         changes=loss_with({"velocity": lambda _, velocity, track, x, sigma, policy="live": velocity(
             track, x, sigma, policy=policy) * (2 if policy == "fake" else 1)})),
    dmd2("learns-twice", REFERENCE, "weighs the loss of its fake score twice",
         changes=values(lambda _, values, __: 2 * values, of="fake_score_loss")),
    draft("makes-them-worse", "a-step-raises-the-reward", "follows the gradient of the reward downwards",
          also=(REFERENCE,),
          changes=loss_with({"decode": lambda _, decode, track, x: decode(track, 2 * x.detach() - x)})),
    # Its loss is -1 everywhere.
    draft("ignores-the-scale", "the-gradient-scales-with-the-reward", "divides rewards by their own size",
          gap=True, arguments={"score": normalised}),
]
# fmt: on
MUTANTS = [*LATENT, *algorithm_text.MUTANTS]
HEALTHY = (
    FLOW_GRPO,
    replace(
        FLOW_GRPO, name="guard", trial={"ratio_norm": True, "step_weight": "inverse-dt", "clip_schedule": "cosine"}
    ),
    replace(
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
    replace(PLAIN, name="pairs", build=f"{__name__}:build_pairs"),
    DRAFT,
    replace(DRAFT, name="draft-deep", trial={"gradient_steps": 3, "checkpointing": False}),
    replace(DRAFT, name="draft-drawn", trial={"noise_draws": 2}),
    replace(DRAFT, name="draft-hinged", trial={"reward_loss": "hinge", "reward_target": 2.0}),
    *algorithm_text.HEALTHY,
)
build = builder(MUTANTS)


def catalog() -> Catalog:
    quickstart = (
        unirl.models.sd3.plugin,
        unirl.engines.trainside.plugin,
        unirl.backends.fsdp2.plugin,
        unirl.rewards.rules.plugin,
    )
    healthy = plugin(algorithms=HEALTHY)
    healthy.unirl_check_plan = _check_plan
    return catalog_of(healthy, *quickstart, algorithms=specs(MUTANTS, module=__name__))


@hookimpl
def _check_plan(plan: Plan) -> list[Reason]:
    """Real runs take a quarter of a minute each; one is enough to see that the claim about them can fail."""
    if plan.only.algorithm.name == "turns-round":
        return []
    return [Reason(key="algorithm", text=f"{plan.only.algorithm.name!r} is tried on the tiny denoiser alone.")]
