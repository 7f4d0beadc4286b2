"""The gradient of a reward, against differences of its own scores."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.reward import RewardCase, flags_of, pixels_of, with_media
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import UniRLError
from unirl.core.roles import Reward, ScoreInput
from unirl.core.specs.capability import Cap

DIRECTIONS = 4
STEPS = {torch.float64: (1e-3, 2.5e-4, 6e-5, 1.5e-5), torch.float32: (5e-2, 1.2e-2, 3e-3, 8e-4)}
"""Half widths of the differences that are tried. The best one lies near the cube root of the precision."""
BOUND = {torch.float64: 1e-6, torch.float32: 3e-2}
"""Largest error, as a share of the slope. A central difference at its best keeps two thirds of the digits, 10 of 16 or
5 of 7; a sum over thousands of pixels and a network take some of them. What is wrong in a gradient (a sign, a factor,
a channel that is cut off) moves it by a third and more."""


@claim("reward", proves=Cap.REWARD_DIFFERENTIABLE)
def test_the_gradient_is_that_of_the_score(case: RewardCase) -> None:
    """The gradient with respect to the pixels is the slope of the score: training through the sampler follows it.

    Directional derivatives are compared with central differences, in fp64 where the reward keeps it.

    If it fails: look for a `detach`, `no_grad`, a rounding or a cast to uint8 on the way, for preprocessing that the
    gradient goes around, and for a scale that the score has and the gradient has not.
    """
    _needs_pixels(case)
    with case.reward() as reward:
        for samples in case.batches():
            result = _slopes(case, reward, samples)
            assert result is not None, "the scores do not depend on the pixels as far as autograd can see"
            slopes, differences, dtype = result
            assert bool(slopes.any()), "the gradient is 0 everywhere"
            case.record("gradient error", _error(slopes, differences), bound=BOUND[dtype])


@claim("reward")
def test_an_undeclared_gradient_is_absent_or_correct(case: RewardCase) -> None:
    """A reward that does not state that it is differentiable gives no gradient, or the right one.

    A wrong one would train without a word of warning.

    If it fails: cut the graph (`images.detach()`, or `no_grad` around the score).
    """
    _needs_pixels(case)
    if Cap.REWARD_DIFFERENTIABLE in case.spec.capabilities:
        raise NotApplicable("the reward promises its gradient, which is a claim of its own")
    with case.reward() as reward:
        for samples in case.batches():
            case.score(reward, samples)
            try:
                result = _slopes(case, reward, samples)
            except (RuntimeError, ValueError, TypeError, UniRLError):
                # It scores these samples, and rejects them with a gradient: that is not a wrong gradient.
                continue
            if result is not None:
                slopes, differences, dtype = result
                case.record("gradient error", _error(slopes, differences), bound=BOUND[dtype])


def _needs_pixels(case: RewardCase) -> None:
    if not case.has_pixels:
        raise NotApplicable(f"the reward scores {case.spec.media}, which has no pixels")


def _slopes(case: RewardCase, reward: Reward, samples: ScoreInput) -> tuple[Tensor, Tensor, torch.dtype] | None:
    """Slopes along some directions by autograd and by differences, each [DIRECTIONS]; None when the graph is cut.

    The function is a weighted sum of the scores, so that scores of a group may depend on each other.
    """
    random = torch.Generator().manual_seed(5)
    # Away from 0 and 1, so that no difference leaves what a decoder can give.
    start = 0.1 + 0.8 * pixels_of(samples)
    dtype = torch.float64 if _keeps_fp64(case, reward, samples, start) else torch.float32
    start = start.to(dtype)
    weights = (0.5 + torch.rand(len(samples.sample_ids), generator=random, dtype=torch.float64)).to(start.device)

    def total(pixels: Tensor) -> Tensor:
        scores = reward.score(with_media(samples, pixels, media=case.spec.media))
        values, has_score = scores.values.double(), flags_of(scores).to(scores.values.device)
        return (values * weights.to(values.device))[has_score].sum()

    with torch.enable_grad():
        pixels = start.clone().requires_grad_()
        out = total(pixels)
        if not out.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(out, pixels, allow_unused=True)
    if gradient is None:
        return None
    # Signs rather than normal numbers: each pixel counts the same, and none moves far.
    signs = torch.randint(0, 2, (DIRECTIONS, *start.shape), generator=random).to(start) * 2 - 1
    slopes = (gradient.double() * signs.double()).flatten(1).sum(1).cpu()
    with torch.no_grad():
        tried = [
            torch.stack([(total(start + h * v) - total(start - h * v)) / (2 * h) for v in signs]).cpu()
            for h in STEPS[dtype]
        ]
    # Wide steps suffer from curvature, narrow ones from rounding; the two that agree best suffer least.
    best = min(range(1, len(tried)), key=lambda number: float((tried[number] - tried[number - 1]).norm()))
    return slopes, tried[best], dtype


def _keeps_fp64(case: RewardCase, reward: Reward, samples: ScoreInput, start: Tensor) -> bool:
    """Whether the reward computes in fp64 when the pixels are. Roles promise only fp32."""
    with torch.no_grad():
        try:
            one, other = (
                reward.score(with_media(samples, start.double() + shift, media=case.spec.media)).values
                for shift in (0.0, 1e-10)
            )
        except (RuntimeError, ValueError, TypeError, UniRLError):
            return False
    return one.dtype == torch.float64 and bool((one != other).any())


def _error(slopes: Tensor, differences: Tensor) -> float:
    largest = max(float(slopes.norm()), float(differences.norm()))
    return float((slopes - differences).norm()) / largest if largest else 0.0
