"""Rewards with one fault each, next to healthy rewards of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.fixtures.reward import with_media
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec
from unirl.core.types.track import Status
from unirl.rewards.rules.brightness import BrightnessReward
from unirl.rewards.rules.plugin import BRIGHTNESS, EXACT_MATCH, PIXEL_TARGET, SHAPES, unirl_rewards

from conformance_mutants.changes import Change, closes_once, returns, takes
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs


class Motion:
    """How much a video moves: mean square of the differences of its frames. Keeps fp32 whatever it gets."""

    def __init__(self, config: Any, *, device: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        videos = samples.of("video", reward="motion").arrays
        values = torch.stack([(video[1:] - video[:-1]).float().square().mean() for video in videos])
        if not bool(values.isfinite().all()):
            raise ValueError("motion: a video has pixels that are not finite")
        return Scores(values=values)

    def close(self) -> None:
        pass


class BrightestOfGroup(BrightnessReward):
    """Luma above the mean of the group."""

    def __init__(self, config: Any, *, device: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        values = super().score(samples).values
        rows = [[row for row, other in enumerate(samples.group_ids) if other == group] for group in samples.group_ids]
        return Scores(values=values - torch.stack([values[own].mean() for own in rows]))


class WithoutDark(BrightnessReward):
    """Luma; dark images have no score."""

    def __init__(self, config: Any, *, device: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        luma = super().score(samples).values
        has_score = luma > 0.2
        return Scores(values=luma.where(has_score, torch.nan), scored=has_score)


class AppliesItsWeight(BrightnessReward):
    def __init__(self, config: Any, *, device: Any) -> None:
        self.weight = config.weight

    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self.weight * super().score(samples).values)


SOME = replace(BRIGHTNESS, name="without-dark", build=f"{__name__}:WithoutDark")
GROUP = replace(
    BRIGHTNESS,
    name="brightest-of-group",
    build=f"{__name__}:BrightestOfGroup",
    capabilities={Cap.REWARD_GROUP},
    range=(-1.0, 2.0),
)
VIDEO = replace(
    BRIGHTNESS,
    name="motion",
    build=f"{__name__}:Motion",
    media="video",
    capabilities={Cap.REWARD_SAMPLE, Cap.REWARD_DIFFERENTIABLE},
    examples=(RewardExample(height=16, width=24, frames=3), RewardExample(height=8, width=8, frames=5)),
)


def reward(
    name: str, claim: str, breaks: str, changes: dict[str, Change] | None = None, *, spec: RewardSpec = BRIGHTNESS
) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, spec=spec, changes=changes or {})


def values(change: Callable[[ScoreInput, Tensor], Tensor]) -> dict[str, Change]:
    """Other scores. change: gets the samples and the healthy scores."""
    return {"score": lambda _, score, samples: Scores(values=change(samples, score(samples).values))}


def images_of(samples: ScoreInput) -> Tensor:
    return samples.of("image", reward="mutant").stacked


def with_images(change: Callable[[Tensor], Tensor]) -> dict[str, Change]:
    """Scores of other images."""
    return {
        "score": takes(
            lambda samples: with_media(samples, change(images_of(samples)), media="image") if samples.media else samples
        )
    }


def with_first_of_group(samples: ScoreInput, values: Tensor) -> Tensor:
    for group in set(samples.group_ids):
        values[samples.group_ids.index(group)] += 1
    return values


def above_the_batch(part: BrightestOfGroup, _: Any, samples: ScoreInput) -> Scores:
    luma = BrightnessReward.score(part, samples).values
    return Scores(values=luma - luma.mean())


def less_if_seen(part: Any, score: Any, samples: ScoreInput) -> Scores:
    values = score(samples).values
    seen, content = vars(part).setdefault("seen", set()), images_of(samples).detach().cpu().numpy().tobytes()
    scale = 0.9 if content in seen else 1.0
    seen.add(content)
    return Scores(values=scale * values)


def cached_by_ids(part: Any, score: Any, samples: ScoreInput) -> Scores:
    return vars(part).setdefault("cache", {}).setdefault(samples.sample_ids, score(samples))


def clamping_images(samples: ScoreInput, values: Tensor) -> Tensor:
    images_of(samples).detach().clamp_(0.05, 0.95)
    return values


def grey_if_missing(_: Any, score: Any, samples: ScoreInput) -> Scores:
    if samples.media is None:
        return Scores(values=torch.full((len(samples.sample_ids),), 0.5))
    return score(samples)


def with_gradient_of_variance(samples: ScoreInput, values: Tensor) -> Tensor:
    other = images_of(samples).flatten(1).float().var(dim=1)
    return values + other - other.detach()


def halving_the_longest(samples: ScoreInput, values: Tensor) -> Tensor:
    assert samples.lengths is not None
    is_longest = torch.tensor([length == max(samples.lengths) for length in samples.lengths])
    return values * (1 - 0.5 * is_longest.float())


def fined_by_the_first(samples: ScoreInput, values: Tensor) -> Tensor:
    assert samples.status is not None
    return values * (0.5 if samples.status[0] is Status.TRUNCATED else 1.0)


ANY_BATCH, ROWS = "a-sample-scores-the-same-in-any-batch", "scores-go-with-their-samples"
# fmt: off
MUTANTS = [
    reward("first-of-group-wins", ROWS, "gives one more to the first row of each group", values(with_first_of_group),
           spec=GROUP),
    reward("above-the-batch", "a-group-scores-the-same-in-any-batch",
           "subtracts the mean of the batch instead of the group's",
           {"score": above_the_batch}, spec=GROUP),
    reward("in-fp64", "every-sample-gets-one-finite-score", "gives its scores in fp64",
           values(lambda _, luma: luma.double())),
    reward("least-of-the-batch", ANY_BATCH, "subtracts the smallest score of the batch",
           values(lambda _, luma: luma - luma.min())),
    reward("leaves-out-the-first", "a-sample-has-a-score-in-every-batch-or-in-none",
           "leaves the first row of a batch without a score",
           {"score": returns(lambda scores: replace(scores, scored=torch.arange(len(scores.values)) > 0))}),
    reward("out-of-255", "scores-lie-in-the-stated-range", "scores from 0 to 255, states 0 to 1",
           values(lambda _, luma: 255 * luma)),
    reward("constant", "different-samples-get-different-scores", "gives 1 to every sample",
           values(lambda _, luma: luma.ceil().clamp(1, 1))),
    reward("applies-its-weight", "the-scale-is-the-same-at-every-weight", "multiplies its scores by its weight",
           spec=replace(BRIGHTNESS, build=f"{__name__}:AppliesItsWeight")),
    reward("remembers", "scoring-is-deterministic", "gives less to a batch that it has seen", {"score": less_if_seen}),
    reward("caches-by-ids", "scores-do-not-depend-on-names", "caches scores by sample ids", {"score": cached_by_ids}),
    reward("clamps-in-place", "a-reward-does-not-modify-samples", "clamps the images in place",
           values(clamping_images)),
    reward("nan-is-black", "non-finite-pixels-raise", "scores NaN pixels as black", with_images(Tensor.nan_to_num)),
    reward("nothing-is-grey", "samples-without-their-media-raise", "gives 0.5 to a missing image",
           {"score": grey_if_missing}),
    reward("closes-once", "a-reward-may-be-closed-twice", "raises at the second close", {"close": closes_once}),
    reward("gradient-of-contrast", "an-undeclared-gradient-is-absent-or-correct",
           "scores luma and gives the gradient of the variance", values(with_gradient_of_variance)),
    reward("cuts-red", "the-gradient-is-that-of-the-score", "gives no gradient to the red channel",
           with_images(lambda images: torch.cat([images[:, :1].detach(), images[:, 1:]], dim=1)), spec=PIXEL_TARGET),
    reward("forgets-a-part", "components-are-those-of-the-spec", "gives three of its four parts",
           {"score": returns(lambda scores: replace(
               scores, parts={name: one for name, one in scores.parts.items() if name != "perfect"}))}, spec=SHAPES),
    reward("no-answer-is-empty", "a-missing-metadata-key-raises-with-its-name",
           "takes a missing answer for an empty one",
           {"score": takes(lambda samples: replace(
               samples, metadata=tuple({"answer": "", **one} for one in samples.metadata)))}, spec=EXACT_MATCH),
    reward("reads-what-it-does-not-state", "the-metadata-that-the-spec-names-is-enough",
           "reads `answer`, which its spec does not name", spec=replace(EXACT_MATCH, metadata=())),
    reward("halves-the-longest", ANY_BATCH, "halves the score of the longest text of the batch",
           values(halving_the_longest), spec=EXACT_MATCH),
    reward("first-for-all", ROWS, "fines all texts where the first one was truncated", values(fined_by_the_first),
           spec=EXACT_MATCH),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    return catalog_of(plugin(rewards=[*unirl_rewards(), GROUP, VIDEO, SOME]), rewards=specs(MUTANTS, module=__name__))
