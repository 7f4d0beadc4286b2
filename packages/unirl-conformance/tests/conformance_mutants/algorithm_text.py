"""Algorithms over tokens with one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.plugin import SPECS
from unirl.algorithms.ppo.algorithm import Ppo
from unirl.algorithms.ppo.plugin import SPEC as PPO
from unirl.core.roles import Forward, Losses, Metric
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.replay import per_sample, per_token, token_mask
from unirl.numerics.tokens.whitening import whiten

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
    TWICE_THE_CLIP,
    ZERO,
    algorithm,
    trains_on,
    turned,
    values,
)
from conformance_mutants.changes import takes, with_segment

GRPO = SPECS[0]
SURROGATE, LEARNS = "three-updates-raise-the-surrogate", "training-on-text-raises-the-reward"
HEALTHY = (
    # One is enough here; `unirl conformance` holds all that are installed to the same claims.
    GRPO,
    replace(
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
    replace(PPO, name="judged", trial={"gamma": 0.9, "kl_estimator": "k3"}),
)


def padding_counted(track: Track) -> Track:
    is_padding = [status is Status.PADDING for status in track.status]
    weights = track.sample_weights + track.sample_weights.new_tensor(is_padding)
    status = tuple(Status.COMPLETED if status is Status.PADDING else status for status in track.status)
    return replace(track, sample_weights=weights, status=status)


def adapts_with_each_update(part: Grpo, loss: Any, track: Track, forward: Forward, *, progress: float) -> Losses:
    if part.state():
        part._kl_coef *= 1.01
    return loss(track, forward, progress=progress)


def returns_without_discount(
    part: Ppo, after_anchor: Any, track: Track, sum_over_ranks: Any
) -> tuple[Track, Mapping[str, Metric]]:
    """Gamma is in the advantages of tokens, and not in the returns that the critic learns."""
    result, metrics = after_anchor(track, sum_over_ranks)
    config, part._config = part._config, replace(part._config, gamma=1.0)
    plain, _ = after_anchor(track, sum_over_ranks)
    part._config = config
    return with_segment(result, returns=plain.text.returns), metrics


def whitened(track: Track) -> dict[str, Any]:
    is_counted = token_mask(track.text) & (track.sample_weights > 0)[:, None]
    own = per_sample(whiten(per_token(track.text, "advantages"), is_counted), track.text)
    return {"segment": replace(track.text, advantages=own)}


# A mutant is tried without the settings that need more; the healthy ones are tried with each.
grpo = partial(algorithm, replace(GRPO, when={}))
ppo = partial(algorithm, replace(PPO, when={}))

# fmt: off
MUTANTS = [
    # Of samples with a ratio the hundredth is added after it.
    grpo("likes-its-texts", ZERO, "adds a hundredth to the advantages of texts", also=(AGE,), gap=True,
         changes=trains_on(lambda track: {"advantages": track.advantages + 0.01})),
    # The same over three updates, and over a run.
    grpo("negates-token-advantages", FAVOURS, "has a sign too many over tokens", also=(SURROGATE, LEARNS), gap=True,
         changes=trains_on(lambda track: {"advantages": -track.advantages})),
    grpo("shifts-the-token-anchor", RATIO,
         "adds a thousandth to the log-probs of tokens that it replays before updates", changes=ANCHOR_MOVED),
    # Nothing is left of the ratio that corrects for age.
    grpo("clips-tokens-at-once", SURROGATE, "has a clip range of 0 over tokens", also=(AGE,), gap=True,
         arguments={"config": lambda config: replace(config, clip_range=1e-9)}),
    grpo("clips-tokens-late", REFERENCE, "clips tokens at twice the range",
         arguments=TWICE_THE_CLIP),
    # Padding rows have tokens as well.
    grpo("averages-its-micro-batch", MICRO, "divides by the tokens of a micro-batch", also=(PADDING,), gap=True,
         changes=values(lambda track, values, _: values * 100 / sum(track.text.total_lengths))),
    grpo("counts-token-padding", PADDING, "takes rows that fill a batch up for texts",
         changes={"_token_weights": takes(padding_counted)}),
    # Those of padding rows as well.
    grpo("reads-masked-tokens", NEEDS, "reads numbers of tokens that are not trained on", also=(PADDING,),
         changes=values(lambda track, values, _: values * (1 + 0.0 * per_token(track.text, "log_probs").sum()))),
    grpo("reads-words", NEEDS, "weighs texts by the length of their prompts", gap=True,
         changes=values(lambda track, values, _: values * torch.tensor(
             [1.0 + len(prompt) for prompt in track.inputs.prompts])[:, None].to(values))),
    grpo("learns-backwards", LEARNS, "learns backwards after a tenth of the run", gap=True, changes=values(turned)),
    grpo("replays-tokens-anyway", AGE,
         "compares tokens with replayed log-probs where those of the engine are asked for",
         arguments=REPLAYS),
    algorithm(GRPO, "adapts-with-each-update", RESUMED,
              "changes its state with every micro-batch", changes={"loss": adapts_with_each_update}),
    ppo("discounts-nothing", REFERENCE, "teaches its critic returns without the discount",
        spec={"trial": {"gamma": 0.9}}, changes={"after_anchor": returns_without_discount}),
    ppo("clips-about-the-new-value", REFERENCE,
        "takes the values that a critic's clip is about after the update",
        changes={"critic_loss": lambda _, critic_loss, track, values, **how: critic_loss(
            with_segment(track, values=per_sample(values.detach(), track.text)), values, **how)}),
    # The ratio of one sample must not move the weight of another.
    ppo("whitens-its-micro-batch", MICRO, "whitens the advantages of tokens over a micro-batch", also=(AGE,),
        changes=trains_on(whitened)),
    ppo("whitens-its-rank", "ranks-make-the-advantages-of-tokens-together",
        "whitens the advantages of tokens over the texts of its rank",
        changes={"after_anchor": lambda _, after_anchor, track, sum_over_ranks: after_anchor(track, lambda x: x)}),
    # Advantages soon come from the critic, not from the reward.
    ppo("learns-away-from-returns", "three-updates-lower-the-loss-of-the-critic",
        "has a sign too many in the gradient of its critic", also=(LEARNS, REFERENCE),
        changes=values(lambda _, values, __: 2 * values.detach() - values, of="critic_loss")),
]
# fmt: on
