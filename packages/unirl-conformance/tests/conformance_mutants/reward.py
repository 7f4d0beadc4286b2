"""Rewards that are broken in one way each, next to rewards of every kind that are well."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Catalog
from unirl.core.hookspec import hookimpl
from unirl.core.roles import Reward, ScoreInput, Scores
from unirl.core.spec import RewardExample, RewardSpec
from unirl.core.track import Status
from unirl.rewards.rules.brightness import BrightnessReward
from unirl.rewards.rules.exact_match import ExactMatchReward
from unirl.rewards.rules.pixel_target import PixelTargetReward
from unirl.rewards.rules.plugin import BRIGHTNESS, EXACT_MATCH, PIXEL_TARGET, SHAPES, unirl_rewards
from unirl.rewards.rules.shapes import ShapesReward

from conformance_mutants.mutant import Mutant


class Motion:
    """How much a video moves: mean square of the differences of its frames. Keeps fp32 whatever it gets."""

    def __init__(self, config: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.videos is not None, "motion needs videos"
        squares = [(video[1:] - video[:-1]).float().square().mean() for video in samples.videos]
        values = torch.stack(squares)
        if not bool(values.isfinite().all()):
            raise ValueError("motion: a video has pixels that are no numbers")
        return Scores(values=values)

    def close(self) -> None:
        pass


class BrightestOfGroup:
    """Luma above the mean of the group."""

    def __init__(self, config: Any) -> None:
        self._luma = BrightnessReward()

    def score(self, samples: ScoreInput) -> Scores:
        luma = self._luma.score(samples).values
        return Scores(values=luma - _means(luma, samples.group_ids))

    def close(self) -> None:
        pass


class FirstOfGroupWins(BrightestOfGroup):
    def score(self, samples: ScoreInput) -> Scores:
        values = super().score(samples).values
        for group in set(samples.group_ids):
            values[samples.group_ids.index(group)] += 1
        return Scores(values=values)


class AboveTheBatch(BrightestOfGroup):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self._luma.score(samples).values
        return Scores(values=luma - luma.mean())


class Luma(BrightnessReward):
    """Brightness, for what is broken about it."""

    def __init__(self, config: Any) -> None:
        self._weight = config.weight

    def luma(self, samples: ScoreInput) -> Tensor:
        return super().score(samples).values


class InFp64(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self.luma(samples).double())


class LeastOfTheBatch(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        return Scores(values=luma - luma.min())


class OutOf255(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=255 * self.luma(samples))


class Constant(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self.luma(samples).ceil().clamp(1, 1))


class AppliesItsWeight(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self._weight * self.luma(samples))


class Remembers(Luma):
    """Images that it has seen before are worth less."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._seen: set[bytes] = set()

    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        assert samples.images is not None
        content = samples.images.detach().cpu().numpy().tobytes()
        scale = 0.9 if content in self._seen else 1.0
        self._seen.add(content)
        return Scores(values=scale * luma)


class CachesByIds(Luma):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._cache: dict[tuple[str, ...], Tensor] = {}

    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self._cache.setdefault(samples.sample_ids, self.luma(samples)))


class ClampsInPlace(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        assert samples.images is not None
        samples.images.detach().clamp_(0.05, 0.95)
        return Scores(values=luma)


class TakesNanForBlack(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        images = None if samples.images is None else samples.images.nan_to_num()
        return Scores(values=self.luma(dataclasses.replace(samples, images=images)))


class TakesNothingForGrey(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        if samples.images is None:
            return Scores(values=torch.full((len(samples.sample_ids),), 0.5))
        return Scores(values=self.luma(samples))


class ClosesOnce(Luma):
    def close(self) -> None:
        del self._weight


class GradientOfContrast(Luma):
    """The score of luma with the gradient of something else."""

    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        assert samples.images is not None
        other = samples.images.flatten(1).float().var(dim=1)
        return Scores(values=luma + other - other.detach())


class CutsRed(PixelTargetReward):
    def __init__(self, config: Any) -> None:
        super().__init__(config, device="cpu")

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.images is not None
        red, rest = samples.images[:, :1].detach(), samples.images[:, 1:]
        return super().score(dataclasses.replace(samples, images=torch.cat([red, rest], dim=1)))


class ForgetsAPart(ShapesReward):
    def __init__(self, config: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        scores = super().score(samples)
        return Scores(values=scores.values, parts={k: v for k, v in scores.parts.items() if k != "perfect"})


class NoAnswerIsEmpty(ExactMatchReward):
    def score(self, samples: ScoreInput) -> Scores:
        metadata = tuple({"answer": "", **found} for found in samples.metadata)
        return super().score(dataclasses.replace(samples, metadata=metadata))


class ReadsWhatItDoesNotState(ExactMatchReward):
    """Its spec names no metadata."""


class HalvesTheLongest(ExactMatchReward):
    """Compares the lengths of all texts of a batch."""

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.lengths is not None
        is_longest = torch.tensor([length == max(samples.lengths) for length in samples.lengths])
        return Scores(values=super().score(samples).values * (1 - 0.5 * is_longest.float()))


class TakesTheFirstForAll(ExactMatchReward):
    """Fines every text where the first one was cut off."""

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.status is not None
        factor = 0.5 if samples.status[0] is Status.TRUNCATED else 1.0
        return Scores(values=super().score(samples).values * factor)


def _means(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The mean of each row's group."""
    rows = [[other for other, found in enumerate(groups) if found == group] for group in groups]
    return torch.stack([values[own].mean() for own in rows])


GROUP = dataclasses.replace(
    BRIGHTNESS,
    name="brightest-of-group",
    build=f"{__name__}:build",
    capabilities={Cap.REWARD_GROUP: Support.NATIVE, Cap.REWARD_SAMPLE: Support.NO},
    range=(-1.0, 2.0),
)
VIDEO = dataclasses.replace(
    BRIGHTNESS,
    name="motion",
    build=f"{__name__}:build",
    media="video",
    capabilities={Cap.REWARD_SAMPLE: Support.NATIVE, Cap.REWARD_DIFFERENTIABLE: Support.NATIVE},
    examples=(RewardExample(height=16, width=24, frames=3), RewardExample(height=8, width=8, frames=5)),
)
UNSTATED = dataclasses.replace(EXACT_MATCH, metadata=())

BROKEN: dict[type[Any], tuple[RewardSpec, Mutant]] = {
    InFp64: (
        BRIGHTNESS,
        Mutant(claim="every-sample-gets-one-finite-score", name="in-fp64", broken="gives its scores in fp64"),
    ),
    FirstOfGroupWins: (
        GROUP,
        Mutant(
            claim="scores-go-with-their-samples",
            name="first-of-group-wins",
            broken="gives one more to the first row of each group",
        ),
    ),
    LeastOfTheBatch: (
        BRIGHTNESS,
        Mutant(
            claim="a-sample-scores-the-same-in-any-batch",
            name="least-of-the-batch",
            broken="subtracts the smallest score of the batch",
        ),
    ),
    AboveTheBatch: (
        GROUP,
        Mutant(
            claim="a-group-scores-the-same-in-any-batch",
            name="above-the-batch",
            broken="subtracts the mean of the batch instead of the group's",
        ),
    ),
    OutOf255: (
        BRIGHTNESS,
        Mutant(claim="scores-lie-in-the-stated-range", name="out-of-255", broken="scores from 0 to 255, states 0 to 1"),
    ),
    Constant: (
        BRIGHTNESS,
        Mutant(claim="scores-tell-samples-apart", name="constant", broken="gives 1 to every sample"),
    ),
    AppliesItsWeight: (
        BRIGHTNESS,
        Mutant(
            claim="the-scale-is-the-same-at-every-weight",
            name="applies-its-weight",
            broken="multiplies its scores by its weight",
        ),
    ),
    ForgetsAPart: (
        SHAPES,
        Mutant(
            claim="parts-are-those-that-the-spec-names", name="forgets-a-part", broken="gives three of its four parts"
        ),
    ),
    Remembers: (
        BRIGHTNESS,
        Mutant(
            claim="the-same-samples-get-the-same-scores-again",
            name="remembers",
            broken="gives less to a batch that it has seen",
        ),
    ),
    CachesByIds: (
        BRIGHTNESS,
        Mutant(
            claim="scores-come-from-the-sample-not-from-its-name",
            name="caches-by-ids",
            broken="caches scores by sample ids",
        ),
    ),
    ClampsInPlace: (
        BRIGHTNESS,
        Mutant(
            claim="a-reward-leaves-samples-as-they-are", name="clamps-in-place", broken="clamps the images in place"
        ),
    ),
    TakesNanForBlack: (
        BRIGHTNESS,
        Mutant(claim="pixels-that-are-not-numbers-raise", name="nan-is-black", broken="scores NaN pixels as black"),
    ),
    TakesNothingForGrey: (
        BRIGHTNESS,
        Mutant(
            claim="samples-without-their-media-raise", name="nothing-is-grey", broken="gives 0.5 to a missing image"
        ),
    ),
    ClosesOnce: (
        BRIGHTNESS,
        Mutant(claim="a-reward-may-be-closed-twice", name="closes-once", broken="raises at the second close"),
    ),
    GradientOfContrast: (
        BRIGHTNESS,
        Mutant(
            claim="a-gradient-that-is-not-promised-is-not-wrong",
            name="gradient-of-contrast",
            broken="scores luma and gives the gradient of the variance",
        ),
    ),
    CutsRed: (
        PIXEL_TARGET,
        Mutant(
            claim="the-gradient-is-that-of-the-score", name="cuts-red", broken="gives no gradient to the red channel"
        ),
    ),
    NoAnswerIsEmpty: (
        EXACT_MATCH,
        Mutant(
            claim="a-missing-metadata-key-raises-with-its-name",
            name="no-answer-is-empty",
            broken="takes a missing answer for an empty one",
        ),
    ),
    HalvesTheLongest: (
        EXACT_MATCH,
        Mutant(
            claim="a-sample-scores-the-same-in-any-batch",
            name="halves-the-longest",
            broken="halves the score of the longest text of the batch",
        ),
    ),
    TakesTheFirstForAll: (
        EXACT_MATCH,
        Mutant(
            claim="scores-go-with-their-samples",
            name="first-for-all",
            broken="fines all texts where the first one was truncated",
        ),
    ),
    ReadsWhatItDoesNotState: (
        UNSTATED,
        Mutant(
            claim="the-metadata-that-the-spec-names-is-enough",
            name="reads-what-it-does-not-state",
            broken="reads `answer`, which its spec does not name",
        ),
    ),
}
MUTANTS = [mutant for _, mutant in BROKEN.values()]


def build(config: Any, *, device: Any) -> Reward:
    """The reward that the config's `use` names."""
    kinds = {mutant.name: kind for kind, (_, mutant) in BROKEN.items()}
    kinds |= {GROUP.name: BrightestOfGroup, VIDEO.name: Motion}
    return kinds[config.use](config)


def catalog() -> Catalog:
    broken = [
        dataclasses.replace(spec, name=mutant.name, build=f"{__name__}:build") for spec, mutant in BROKEN.values()
    ]
    well = [*unirl_rewards(), GROUP, VIDEO]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(unirl_rewards=hookimpl(lambda: well)),
            "unirl-mutants": SimpleNamespace(unirl_rewards=hookimpl(lambda: broken)),
        }
    )
