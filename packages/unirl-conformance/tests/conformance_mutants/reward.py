"""Rewards that are broken in one way each, next to rewards of every kind that are well."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.fixtures.reward import with_media
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Reward, ScoreInput, Scores
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample
from unirl.core.types.track import Status
from unirl.rewards.rules.brightness import BrightnessReward
from unirl.rewards.rules.exact_match import ExactMatchReward
from unirl.rewards.rules.pixel_target import PixelTargetReward
from unirl.rewards.rules.plugin import BRIGHTNESS, EXACT_MATCH, PIXEL_TARGET, SHAPES, unirl_rewards
from unirl.rewards.rules.shapes import ShapesReward

from conformance_mutants.mutant import mutant, mutants_in


class Motion:
    """How much a video moves: mean square of the differences of its frames. Keeps fp32 whatever it gets."""

    def __init__(self, config: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        videos = samples.of("video", reward="motion").arrays
        squares = [(video[1:] - video[:-1]).float().square().mean() for video in videos]
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


class WithoutDark(BrightnessReward):
    """Luma; dark images have no score."""

    def __init__(self, config: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        luma = super().score(samples).values
        has_score = luma > 0.2
        return Scores(values=luma.where(has_score, torch.nan), scored=has_score)


SOME = dataclasses.replace(BRIGHTNESS, name="without-dark", build=f"{__name__}:build")
GROUP = dataclasses.replace(
    BRIGHTNESS,
    name="brightest-of-group",
    build=f"{__name__}:build",
    capabilities={Cap.REWARD_GROUP},
    range=(-1.0, 2.0),
)
UNSTATED = dataclasses.replace(EXACT_MATCH, metadata=())


@mutant(claim="scores-go-with-their-samples", breaks="gives one more to the first row of each group", spec=GROUP)
class FirstOfGroupWins(BrightestOfGroup):
    def score(self, samples: ScoreInput) -> Scores:
        values = super().score(samples).values
        for group in set(samples.group_ids):
            values[samples.group_ids.index(group)] += 1
        return Scores(values=values)


@mutant(
    claim="a-group-scores-the-same-in-any-batch",
    breaks="subtracts the mean of the batch instead of the group's",
    spec=GROUP,
)
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


@mutant(claim="every-sample-gets-one-finite-score", name="in-fp64", breaks="gives its scores in fp64", spec=BRIGHTNESS)
class InFp64(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self.luma(samples).double())


@mutant(
    claim="a-sample-scores-the-same-in-any-batch", breaks="subtracts the smallest score of the batch", spec=BRIGHTNESS
)
class LeastOfTheBatch(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        return Scores(values=luma - luma.min())


@mutant(
    claim="a-sample-has-a-score-in-every-batch-or-in-none",
    breaks="leaves the first row of a batch without a score",
    spec=BRIGHTNESS,
)
class LeavesOutTheFirst(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        return Scores(values=luma, scored=torch.arange(len(luma)) > 0)


@mutant(claim="scores-lie-in-the-stated-range", breaks="scores from 0 to 255, states 0 to 1", spec=BRIGHTNESS)
class OutOf255(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=255 * self.luma(samples))


@mutant(claim="different-samples-get-different-scores", breaks="gives 1 to every sample", spec=BRIGHTNESS)
class Constant(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self.luma(samples).ceil().clamp(1, 1))


@mutant(claim="the-scale-is-the-same-at-every-weight", breaks="multiplies its scores by its weight", spec=BRIGHTNESS)
class AppliesItsWeight(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self._weight * self.luma(samples))


@mutant(claim="scoring-is-deterministic", breaks="gives less to a batch that it has seen", spec=BRIGHTNESS)
class Remembers(Luma):
    """Images that it has seen before are worth less."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._seen: set[bytes] = set()

    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        content = images_of(samples).detach().cpu().numpy().tobytes()
        scale = 0.9 if content in self._seen else 1.0
        self._seen.add(content)
        return Scores(values=scale * luma)


@mutant(claim="scores-do-not-depend-on-names", breaks="caches scores by sample ids", spec=BRIGHTNESS)
class CachesByIds(Luma):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._cache: dict[tuple[str, ...], Tensor] = {}

    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=self._cache.setdefault(samples.sample_ids, self.luma(samples)))


@mutant(claim="a-reward-does-not-modify-samples", breaks="clamps the images in place", spec=BRIGHTNESS)
class ClampsInPlace(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        images_of(samples).detach().clamp_(0.05, 0.95)
        return Scores(values=luma)


@mutant(claim="non-finite-pixels-raise", name="nan-is-black", breaks="scores NaN pixels as black", spec=BRIGHTNESS)
class TakesNanForBlack(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        images = samples.media and with_media(samples, images_of(samples).nan_to_num(), media="image")
        return Scores(values=self.luma(images or samples))


@mutant(
    claim="samples-without-their-media-raise",
    name="nothing-is-grey",
    breaks="gives 0.5 to a missing image",
    spec=BRIGHTNESS,
)
class TakesNothingForGrey(Luma):
    def score(self, samples: ScoreInput) -> Scores:
        if samples.media is None:
            return Scores(values=torch.full((len(samples.sample_ids),), 0.5))
        return Scores(values=self.luma(samples))


@mutant(claim="a-reward-may-be-closed-twice", breaks="raises at the second close", spec=BRIGHTNESS)
class ClosesOnce(Luma):
    def close(self) -> None:
        del self._weight


@mutant(
    claim="an-undeclared-gradient-is-absent-or-correct",
    breaks="scores luma and gives the gradient of the variance",
    spec=BRIGHTNESS,
)
class GradientOfContrast(Luma):
    """The score of luma with the gradient of something else."""

    def score(self, samples: ScoreInput) -> Scores:
        luma = self.luma(samples)
        other = images_of(samples).flatten(1).float().var(dim=1)
        return Scores(values=luma + other - other.detach())


@mutant(claim="the-gradient-is-that-of-the-score", breaks="gives no gradient to the red channel", spec=PIXEL_TARGET)
class CutsRed(PixelTargetReward):
    def __init__(self, config: Any) -> None:
        super().__init__(config, device="cpu")

    def score(self, samples: ScoreInput) -> Scores:
        images = images_of(samples)
        red, rest = images[:, :1].detach(), images[:, 1:]
        return super().score(with_media(samples, torch.cat([red, rest], dim=1), media="image"))


@mutant(claim="components-are-those-of-the-spec", breaks="gives three of its four parts", spec=SHAPES)
class ForgetsAPart(ShapesReward):
    def __init__(self, config: Any) -> None:
        pass

    def score(self, samples: ScoreInput) -> Scores:
        scores = super().score(samples)
        return Scores(values=scores.values, parts={k: v for k, v in scores.parts.items() if k != "perfect"})


@mutant(
    claim="a-missing-metadata-key-raises-with-its-name",
    breaks="takes a missing answer for an empty one",
    spec=EXACT_MATCH,
)
class NoAnswerIsEmpty(ExactMatchReward):
    def score(self, samples: ScoreInput) -> Scores:
        metadata = tuple({"answer": "", **result} for result in samples.metadata)
        return super().score(dataclasses.replace(samples, metadata=metadata))


@mutant(
    claim="the-metadata-that-the-spec-names-is-enough",
    breaks="reads `answer`, which its spec does not name",
    spec=UNSTATED,
)
class ReadsWhatItDoesNotState(ExactMatchReward):
    """Its spec names no metadata."""


@mutant(
    claim="a-sample-scores-the-same-in-any-batch",
    breaks="halves the score of the longest text of the batch",
    spec=EXACT_MATCH,
)
class HalvesTheLongest(ExactMatchReward):
    """Compares the lengths of all texts of a batch."""

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.lengths is not None
        is_longest = torch.tensor([length == max(samples.lengths) for length in samples.lengths])
        return Scores(values=super().score(samples).values * (1 - 0.5 * is_longest.float()))


@mutant(
    claim="scores-go-with-their-samples",
    name="first-for-all",
    breaks="fines all texts where the first one was truncated",
    spec=EXACT_MATCH,
)
class TakesTheFirstForAll(ExactMatchReward):
    """Fines every text where the first one was cut off."""

    def score(self, samples: ScoreInput) -> Scores:
        assert samples.status is not None
        factor = 0.5 if samples.status[0] is Status.TRUNCATED else 1.0
        return Scores(values=super().score(samples).values * factor)


def images_of(samples: ScoreInput) -> Tensor:
    return samples.of("image", reward="mutant").stacked


def _means(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The mean of each row's group."""
    rows = [[other for other, result in enumerate(groups) if result == group] for group in groups]
    return torch.stack([values[own].mean() for own in rows])


VIDEO = dataclasses.replace(
    BRIGHTNESS,
    name="motion",
    build=f"{__name__}:build",
    media="video",
    capabilities={Cap.REWARD_SAMPLE, Cap.REWARD_DIFFERENTIABLE},
    examples=(RewardExample(height=16, width=24, frames=3), RewardExample(height=8, width=8, frames=5)),
)

BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: Any, *, device: Any) -> Reward:
    """The reward that the config's `use` names."""
    kinds = {mutant.name: kind for kind, mutant in BROKEN.items()}
    kinds |= {GROUP.name: BrightestOfGroup, VIDEO.name: Motion, SOME.name: WithoutDark}
    return kinds[config.use](config)


def catalog() -> Catalog:
    broken = [
        dataclasses.replace(mutant.spec, name=mutant.name, build=f"{__name__}:build") for mutant in BROKEN.values()
    ]
    well = [*unirl_rewards(), GROUP, VIDEO, SOME]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(unirl_rewards=hookimpl(lambda: well)),
            "unirl-mutants": SimpleNamespace(unirl_rewards=hookimpl(lambda: broken)),
        }
    )
