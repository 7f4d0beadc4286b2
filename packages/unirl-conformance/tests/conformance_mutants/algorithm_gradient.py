"""Algorithms that follow another gradient than that of the rewards."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from unirl.algorithms.draft.algorithm import Draft
from unirl.algorithms.draft.plugin import DRAFT
from unirl.conformance.doubles.forward import SameForward
from unirl.core.roles import Forward, Losses
from unirl.core.specs.spec import AlgorithmSpec, Gap
from unirl.core.types.track import Track

from conformance_mutants.mutant import mutant, mutants_in

__all__ = ["BROKEN", "WELL", "specs"]

REFERENCE = "the-loss-agrees-with-its-numpy-reference"
DESCENT = "three-updates-lower-the-loss"
WELL = (
    DRAFT,
    dataclasses.replace(DRAFT, name="draft-deep", trial={"gradient_steps": 3, "checkpointing": False}),
    dataclasses.replace(DRAFT, name="draft-drawn", trial={"noise_draws": 2}),
    dataclasses.replace(DRAFT, name="draft-hinged", trial={"reward_loss": "hinge", "reward_target": 2.0}),
)


@mutant(claim="a-step-raises-the-reward", breaks="follows the gradient of the reward downwards", also=(DESCENT,))
class MakesThemWorse(Draft):
    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(track, _Reversed(forward), progress=progress)


class _Reversed(SameForward):
    def decode(self, track: Track, latents: Tensor) -> Tensor:
        return super().decode(track, 2 * latents.detach() - latents)


# Its loss is -1 everywhere.
@mutant(claim="the-gradient-scales-with-the-reward", breaks="divides rewards by their own size", also=(DESCENT,))
class IgnoresTheScale(Draft):
    def __init__(self, config: Any, *, score: Any, **context: Any) -> None:
        def normalised(track: Track, media: Tensor) -> Tensor:
            rewards = score(track, media)
            return rewards / rewards.detach().abs().clamp(min=1e-6)

        super().__init__(config, score=normalised, **context)


BROKEN = mutants_in(__name__)


def build(config: Any, *, advantage: Any, reward_weights: Any, train: Any, **context: Any) -> Draft:
    """The algorithm that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, **context)


def specs() -> list[AlgorithmSpec]:
    return [_spec(kind) for kind in BROKEN]


def _spec(kind: type[Draft]) -> AlgorithmSpec:
    spec = dataclasses.replace(DRAFT, name=BROKEN[kind].name, build=f"{__name__}:build")
    if kind is IgnoresTheScale:
        return dataclasses.replace(spec, gaps=(Gap(claim=REFERENCE, reason=BROKEN[kind].breaks),))
    return spec
